"""The live page in a real Chromium, on a real gateway with workers that join by its WebSocket.

`make test-ui` runs this file, and no other target does: it needs the extra `ui-tests` and Chromium, which is large.
Without them the tests are skipped. axe-core checks the accessibility of every view.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.integration import devices
from tests.integration.devices import eventually
from tests.integration.gateways import OPERATOR, TOKENS, TRAINER, RunningGateway, gateway
from tests.integration.proxy import free_port

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PACKAGES = [importlib.util.find_spec(name) for name in ("playwright", "axe_playwright_python")]
MISSING = "Chromium: apt-get install chromium" if BROWSER is None else "Playwright: pip install -e '.[ui-tests]'"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None or None in PACKAGES, reason=f"the live page is not looked at without {MISSING}"),
]
DEDICATED, LENT = 1, 12
TOLERATED = re.compile(r"net::ERR_|Failed to load resource")  # while the gateway is away


@contextmanager
def workers(found: RunningGateway, model: Path, lent: int = LENT, step_s: float = 0.01) -> Iterator[None]:
    numbers = [str(DEDICATED), str(lent), str(step_s)]
    command = [sys.executable, "-m", "tests.integration.fleet_of_workers", found.url, model.name, *numbers]
    process = subprocess.Popen(command, env=os.environ | TOKENS)
    try:
        eventually(lambda: len(found.members()) == DEDICATED + lent)
        yield
    finally:
        process.kill()
        process.wait()


class OpenPage:
    """A page of Chromium with what it complained about."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.page = browser.new_page(viewport={"width": 1500, "height": 950}, **options)
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self._note(message.type, message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(f"{url}/ui")

    def _note(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def connect(self, token: str = OPERATOR) -> None:
        self.page.fill("#token", token)
        self.page.click("#token-form button")

    def tile(self, name: str) -> str:
        return str(self.page.locator(".tiles div", has_text=name).locator("dd").first.inner_text())

    def row(self, name: str) -> Any:
        return self.page.locator(f'[data-worker="{name}"]')

    def check_accessibility(self) -> None:
        """Run axe-core in the page."""
        self.page.evaluate((importlib.resources.files("axe_playwright_python") / "axe.min.js").read_text())
        violations = self.page.evaluate("axe.run()")["violations"]
        assert not violations, [(one["id"], [node["html"][:200] for node in one["nodes"]][:3]) for one in violations]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        chromium = running.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield chromium
        chromium.close()


def play(found: RunningGateway, name: str, turns: int = 2) -> None:
    """One trajectory of a group that stays open."""
    body = {"id": name, "group": name, "group_size": 2, "task": "<b>cross</b>"}
    begun = found.ask("POST", "/v1/trajectories", body).json
    ids = list(b"Which way? ")
    for _ in range(turns):
        sampling = {"logprobs": 1, "ignore_eos": True, "max_tokens": 24}
        body = {"token_ids": ids, "sampling_params": sampling}
        answer = found.ask("POST", "/inference/v1/generate", body, session=begun["session"]).json
        ids = [*ids, *answer["choices"][0]["token_ids"], *b" And now?"]
    assert found.ask("POST", f"/v1/trajectories/{name}/finish", {"reward": 0.5}, token=TRAINER).status == 200


def test_the_page_shows_live_figures_and_drains_devices(model_folder: Path, browser: Any) -> None:
    with gateway(model_folder) as found, workers(found, model_folder):
        opened = OpenPage(browser, found.url)
        page = opened.page
        page.wait_for_selector("#token", state="visible")
        assert not page.locator("#inside").is_visible() and "device-0" not in page.content()
        opened.connect("not-the-operators-token")
        page.wait_for_selector("#gate-error:has-text('token')")
        opened.connect()
        page.wait_for_selector("[data-worker]")
        assert opened.tile("Workers") == str(DEDICATED + LENT)
        page.wait_for_selector('[data-worker="device-0003"]:has-text("of 500 ms")')  # users' times came by heartbeats
        opened.check_accessibility()

        opened.row("device-0003").get_by_role("button", name="drain device-0003").click()
        page.wait_for_selector('[data-worker="device-0003"]:has-text("drained")')
        eventually(lambda: found.members(state="drained", place="parked") == ["device-0003"])

        page.fill("#filter", "rack=r1")
        page.select_option("#scope", "shown")
        shown = page.locator("[data-worker]").count()
        page.click("[data-action=pause]")
        page.click("#ask-yes")
        page.wait_for_selector(f"#order-result:has-text('{shown} workers')")
        eventually(lambda: len(found.members(state="paused")) == shown > 1)
        page.fill("#filter", "")
        page.select_option("#scope", "all")
        page.click("[data-action=resume]")
        page.click("#ask-yes")
        eventually(lambda: not found.members(state="paused") and not found.members(state="drained"))
        opened.row("device-0003").get_by_role("button", name="device-0003", exact=True).click()
        page.wait_for_selector("#one svg path")
        opened.check_accessibility()
        assert [text for text in opened.complaints if "401" not in text] == []
        assert not any(OPERATOR in url or not url.startswith((found.url, "data:")) for url in opened.requests)
        page.close()


def test_training_and_trajectories_are_shown_as_text(model_folder: Path, browser: Any) -> None:
    with gateway(model_folder) as found, workers(found, model_folder, lent=2):
        for number in range(3):
            play(found, f"lake-{number}")
        opened = OpenPage(browser, found.url, color_scheme="dark")
        page = opened.page
        opened.connect()
        page.click("#tab-training")
        page.wait_for_selector("#training-charts svg path")
        assert opened.tile("Trajectories held") == "3" and opened.tile("Generated tokens") == "144"
        opened.check_accessibility()
        page.click("#tab-trajectories")
        page.get_by_role("button", name="lake-1").click()
        page.wait_for_selector("#trajectory .turn")
        assert page.locator("#trajectory .turn").count() == 2 and page.locator("#trajectory b").count() == 0
        assert "<b>cross</b>" in page.inner_text("#trajectory") and "0.5" in page.inner_text("#trajectory")
        opened.check_accessibility()
        page.click("#leave")
        assert page.locator("#token").is_visible() and "lake-1" not in page.content()
        assert page.evaluate("sessionStorage.length") == 0 and opened.complaints == []
        page.close()


def test_the_page_survives_a_restart_of_the_gateway(model_folder: Path, browser: Any, tmp_path: Path) -> None:
    port, ledger = free_port(), f"ledger={tmp_path / 'ledger.sqlite'}"
    with gateway(model_folder, f"port={port}", ledger) as first, workers(first, model_folder, lent=2):
        opened = OpenPage(browser, first.url)
        page = opened.page
        opened.connect()
        page.wait_for_selector("[data-worker]")
        opened.row("device-0001").get_by_role("button", name="pause device-0001").click()
        page.wait_for_selector('[data-worker="device-0001"]:has-text("paused")')
        devices.end(first.device)
        page.wait_for_selector("#status.away")
        with gateway(model_folder, f"port={port}", ledger):
            page.wait_for_selector("#status.live")
            page.wait_for_selector('[data-worker="device-0001"]:has-text("paused")')
            assert [text for text in opened.complaints if not TOLERATED.search(text)] == []
        page.close()


def test_a_thousand_workers_scroll(model_folder: Path, browser: Any) -> None:
    with gateway(model_folder, "beat_s=5", "lease_s=60") as found, workers(found, model_folder, lent=999):
        opened = OpenPage(browser, found.url)
        page = opened.page
        opened.connect()
        page.wait_for_selector("[data-worker]")
        assert opened.tile("Workers") == "1,000"
        page.evaluate("document.getElementById('scroller').scrollTop = 1e9")
        page.wait_for_selector('[data-worker="device-0998"]')
        assert page.locator("[data-worker]").count() < 60
        page.select_option("#scope", "all")
        page.click("[data-action=drain]")
        page.click("#ask-yes")
        page.wait_for_selector("#order-result:has-text('1,000 workers')")
        eventually(lambda: len(found.members(state="drained")) == 1000)
        assert opened.complaints == []
        page.close()
