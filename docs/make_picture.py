"""Draw what one device did for a few seconds, from the journal that it wrote (`rose serve --lend --journal FILE`).

    python docs/make_picture.py journal.jsonl docs/pictures/device.svg --start 12.5 --seconds 2

An admission decision is written before every step, with the shape of serving's last step. So the time between two
decisions is a step of serving if that shape has changed, and a rollout step if the first decision granted one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

from rose.core.facts import Grant, LendingAsked
from rose.observe import journal
from rose.observe.plotting import LEFT, STYLE, Panel, steps, svg

COLOURS = ".serving { color: #0969da } .rollout { color: #2da44e } .waiting { color: #bf8700 }"
HEIGHT, LANE = 250, 44


@dataclass(frozen=True, slots=True)
class Interval:
    """One step of the device, or time without one."""

    begin_s: float
    end_s: float
    kind: str  # serving, rollout or none
    requests: int  # users' requests on the device
    waiting: int  # of these, without a first token
    reason: str

    @property
    def span_s(self) -> float:
        return self.end_s - self.begin_s


def intervals(path: Path) -> list[Interval]:
    """Return what the device did between every two decisions of its journal."""
    asked: list[tuple[float, LendingAsked, Grant]] = []
    for entry in journal.read(path):
        if isinstance(entry.fact, LendingAsked):
            grant = next((decision for decision in entry.decisions if isinstance(decision, Grant)), Grant(0, 0, 0.0))
            asked.append((entry.t_s, entry.fact, grant))
    found = []
    for (begin_s, before, grant), (end_s, after, _) in pairwise(asked):
        is_step = (after.serving.last_step, after.serving.last_step_s) != (
            before.serving.last_step, before.serving.last_step_s)  # fmt: skip
        kind = "serving" if is_step else "rollout" if grant.is_open(begin_s) else "none"
        waiting = len(before.serving.waiting)
        requests = waiting + len(before.serving.running)
        found.append(Interval(begin_s, end_s, kind, requests, waiting, grant.reason))
    return found


def picture(found: Sequence[Interval]) -> str:
    """Return the picture of these intervals: users' requests above, the device's steps below."""
    zero_s, span_s = found[0].begin_s, found[-1].end_s - found[0].begin_s
    most = max(1, *(one.requests for one in found))
    users = Panel((0, span_s), (0, most), height=70, top=34)
    users.levels(range(most + 1), str)
    users.text(LEFT, 20, "users' requests: those that wait for a first token above, those that decode below", "soft")
    device = Panel((0, span_s), (0, 2), height=2 * LANE, top=132)
    for (requests, waiting), group in groupby(found, lambda one: (one.requests, one.waiting)):
        part = list(group)
        begin_s, end_s = part[0].begin_s - zero_s, part[-1].end_s - zero_s
        if waiting:
            users.block(begin_s, end_s, requests - waiting, requests, "waiting", f"{waiting} wait for a first token")
        if requests > waiting:
            users.block(begin_s, end_s, 0, requests - waiting, "serving", f"{requests - waiting} decode")
    for before, one in pairwise(found):
        if one.requests > before.requests:
            device.mark(one.begin_s - zero_s, "a user's request arrives")
    for one in found:
        if one.kind != "none":
            low = 1.08 if one.kind == "serving" else 0.08
            title = f"{one.span_s * 1e3:.1f} ms: {one.reason}"
            device.block(one.begin_s - zero_s, one.end_s - zero_s, low, low + 0.84, one.kind, title)
    for lane, name in ((1.5, "serving"), (0.5, "rollouts")):
        device.text(LEFT - 8, device.up(lane) + 4, name, "end")
    shares = {kind: sum(one.span_s for one in found if one.kind == kind) / span_s for kind in ("serving", "rollout")}
    text = f"steps of the device: serving {shares['serving']:.0%} of the time, rollouts {shares['rollout']:.0%}"
    device.text(LEFT, 124, f"{text}; dashed: a user's request arrives", "soft")
    device.times(steps(0, span_s), lambda value: f"{value:g} s")
    return svg("One device that serves users and lends", HEIGHT, [*users.parts, *device.parts], style=STYLE + COLOURS)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("journal", type=Path)
    options.add_argument("picture", type=Path)
    options.add_argument("--start", type=float, default=0.0, metavar="S", help="since the journal's first decision")
    options.add_argument("--seconds", type=float, default=2.0, metavar="S")
    given = options.parse_args()
    found = intervals(given.journal)
    if not found:
        raise SystemExit(f"{given.journal} has no admission decisions; write it by `rose serve --lend MODEL --journal`")
    start_s = found[0].begin_s + given.start
    shown = [one for one in found if one.begin_s >= start_s and one.end_s <= start_s + given.seconds]
    if not shown:
        raise SystemExit(f"the journal ends {found[-1].end_s - found[0].begin_s:.1f} s after its first decision")
    given.picture.write_text(picture(shown), encoding="utf-8")


if __name__ == "__main__":
    main()
