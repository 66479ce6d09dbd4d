"""Starts the ends as processes on their sides of the link, and asks them for one transfer after the other."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from coserving.children import environment

from syncing.links import TRAINER, WORKERS, Link

METHODS = ("ours", "coo", "full")


class End:
    """One end, by its pipe."""

    def __init__(self, link: Link, side: str, kind: str, parameters: int, seed: int) -> None:
        command = [sys.executable, "-m", "syncing.ends", kind, str(parameters), str(seed)]
        self._process = subprocess.Popen(
            link.inside(side, command), env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.kind = kind

    def ask(self, do: str, **more: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.kind} process left with code {self._process.wait()}; see above")
        found: dict[str, Any] = json.loads(line)
        return found

    def call(self, do: str, **more: Any) -> dict[str, Any]:
        self.ask(do, **more)
        return self.answer()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Cluster:
    """A publisher, its receivers, and one more that joins late."""

    def __init__(self, link: Link, parameters: int, receivers: int, seed: int) -> None:
        self.link, self.parameters = link, parameters
        self._hash = ""  # of the newest version
        self.publisher = End(link, TRAINER, "publish", parameters, seed)
        self.receivers = [End(link, WORKERS, "receive", parameters, seed) for _ in range(receivers)]
        self._arguments = (link, WORKERS, "receive", parameters, seed)
        for end in self.ends():
            end.answer()

    def ends(self) -> list[End]:
        return [self.publisher, *self.receivers]

    def open(self, where: dict[str, Any], run: str, method: str) -> float:
        """Everybody on version 1 of a new run; the share of numbers that every later version changes."""
        self.link.shape(None)
        share = self.publisher.call("open", run=run, method=method, **where)["changed_share"]
        for receiver in self.receivers:
            receiver.call("open", run=run, method=method, **where)
        self._all("prepare")
        return float(share)

    def transfer(self) -> dict[str, Any]:
        """One version from the publisher to all receivers, and its figures."""
        published = self.publisher.call("publish")
        received = self._all("fetch", throttle_mbit_s=self._throttle())
        self._hash = published["hash"]
        assert {answer["hash"] for answer in received} == {self._hash}, "a receiver holds something else"
        prepared = self._all("prepare")
        self.publisher.call("settle")
        slowest = max(received, key=lambda answer: answer["end_s"])
        return {
            "total_s": slowest["end_s"] - published["begin_s"],
            "publish_s": published["end_s"] - published["begin_s"],
            **{
                f"{name}_s": published["seconds"].get(name, 0.0)
                for name in ("read", "encode", "copy", "push", "commit")
            },
            "receive_s": slowest["end_s"] - published["end_s"],
            **{f"{name}_s": slowest["seconds"].get(name, 0.0) for name in ("list", "fetch", "decode", "bring")},
            "prepare_s": max(answer["prepare_s"] for answer in prepared),
            "pause_s": max(answer["pause_s"] for answer in received),
            "bytes": published["bytes"],
            "peak_extra_mb": max(answer["peak_extra_mb"] for answer in [published, *received]),
            "publisher_extra_mb": published["peak_extra_mb"],
        }

    def late_joiner(self, where: dict[str, Any], run: str, method: str) -> dict[str, Any]:
        """Somebody who holds nothing comes to the newest version: by an anchor and deltas, or by all the weights."""
        if method == "full":
            self.publisher.call("republish")
        joiner = End(*self._arguments)
        try:
            joiner.answer()
            joiner.call("open", run=run, method=method, late=True, **where)
            found = joiner.call("fetch", throttle_mbit_s=self._throttle())
        finally:
            joiner.end()
        assert found["hash"] == self._hash, "who joined late holds something else"
        return {"total_s": found["seconds"]["total"], "bytes": found["bytes"], "pause_s": found["pause_s"],
                "fetch_s": found["seconds"]["fetch"], "decode_s": found["seconds"]["decode"],
                "kernel_s": found["kernel_s"],
                "peak_extra_mb": found["peak_extra_mb"] - self.parameters * 2 / 2**20}  # fmt: skip

    def _throttle(self) -> int | None:
        return None if self.link.is_shaped_by_kernel else self.link.mbit_s

    def _all(self, do: str, **more: Any) -> list[dict[str, Any]]:
        """All receivers at the same time."""
        for receiver in self.receivers:
            receiver.ask(do, **more)
        return [receiver.answer() for receiver in self.receivers]

    def close(self) -> None:
        for end in self.ends():
            end.end()


@contextlib.contextmanager
def cluster(link: Link, parameters: int, receivers: int, seed: int) -> Iterator[Cluster]:
    made = Cluster(link, parameters, receivers, seed)
    try:
        yield made
    finally:
        made.close()
