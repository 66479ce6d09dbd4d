"""The public API: the names that `import rose` offers, and what importing one of them loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import rose

ROOT = Path(__file__).parents[2]
CLIENT_MODULES_MAX = 10
PUBLIC = {
    "Batch", "BeginBody", "ChatFrame", "Environment", "Episode", "FinishBody", "FinishedGroup", "GatewayClient",
    "Outcome", "Publisher", "Receiver", "ShardedGatewayClient", "Trajectory", "TurnAnswer", "TurnSampling",
    "VersionSpan", "load_model_folder", "make_environment", "play",
}  # fmt: skip


def test_the_list_of_public_names() -> None:
    assert set(rose.__all__) == PUBLIC | {"__version__"}
    assert dir(rose) == rose.__all__


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_exists_and_is_documented(name: str) -> None:
    assert (getattr(rose, name).__doc__ or "").strip(), f"rose.{name} has no docstring"


def test_the_page_is_what_the_docstrings_say() -> None:
    command = [sys.executable, str(ROOT / "docs" / "make_api.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed == (ROOT / "docs" / "api.md").read_text(), "run: python docs/make_api.py > docs/api.md"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Gateway'"):
        _ = rose.Gateway  # type: ignore[attr-defined]


def test_the_client_loads_no_server() -> None:
    code = "import sys; from rose import GatewayClient; print(sum(m.split('.')[0] == 'rose' for m in sys.modules))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(printed) <= CLIENT_MODULES_MAX
