"""One run as one page: headline figures first, then pictures, then tables. It opens anywhere and loads nothing.

The pictures share what they show with each other: learning over steps; turns by pool, serving's latency against its
budget, and who ran what, over the seconds of the run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Any

from rose.launch.drawing import Picture, round_up
from rose.launch.figures import Line, of_kind, percentile
from rose.launch.report_tables import cost_section, figures_table, headline, notes_section, opening, steps_table

BINS = 48
BIN_S_MIN = 2.0
COLUMNS = 400  # of a row of blocks: two points of the picture each, however long the run was
POOLS = ("borrowed", "dedicated")
Block = tuple[float, float, Any]
"""From when to when, and what is told of it: turns as a number, all else in words."""
STYLE = """
:root { color-scheme: light dark; --ink: #24292f; --soft: #6e7781; --grid: #d8dee4; --paper: #fff; --red: #cf222e }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #8b949e; --grid: #30363d; --paper: #0d1117; --red: #ff7b72 }
}
body { font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; max-width: 960px; margin: 2rem auto;
       padding: 0 1rem; color: var(--ink); background: var(--paper) }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 1.8rem 0 .2rem } p { margin: .2rem 0 .6rem }
table { border-collapse: collapse; margin: .4rem 0 .8rem }
td, th { padding: .15rem 1.2rem .15rem 0; vertical-align: top; text-align: left; font-weight: normal }
th { color: var(--soft) } td + td { font-variant-numeric: tabular-nums }
details { overflow-x: auto } details td, details th { padding-right: .7rem; font-size: 12px; white-space: nowrap }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(160px, 1fr)); gap: .7rem; margin: 1rem 0 }
.tile { border: 1px solid var(--grid); border-radius: 8px; padding: .7rem .8rem } .tile > * { display: block }
.tile b { font-size: 1.45rem; line-height: 1.2; white-space: nowrap } .tile span { font-weight: 600 }
.tile i { font-style: normal; font-size: 12px; color: var(--soft) }
.notes { border-left: 3px solid var(--red); margin: 1rem 0; padding: 0 0 0 1.8rem } .notes li { margin: .2rem 0 }
.trouble { border-color: var(--red) } .trouble b { color: var(--red) }
.bar { display: flex; gap: .8rem; align-items: center; margin: .25rem 0 } .bar span { width: 9rem }
.bar div { flex: 1; display: flex; height: 1.1rem } .bar i { background: var(--hue); height: 100% }
.bar b { width: 6rem; font-weight: normal; font-variant-numeric: tabular-nums }
pre { overflow-x: auto; background: #8881; padding: .8rem; font-size: 12px }
svg { width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg text.soft { fill: var(--soft) } svg text.warn { fill: var(--red) }
.end { text-anchor: end } .middle { text-anchor: middle }
.grid { stroke: var(--grid) } .budget { stroke: var(--red); stroke-dasharray: 5 4 }
.learning, .trainer { --hue: #2f81f7 } .median { --hue: #2f81f788 } .heldout, .evaluation { --hue: #db6d28 }
.dedicated { --hue: #8957e5 } .borrowed { --hue: #2ea043 } .publishing { --hue: #bf8700 }
.line { fill: none; stroke: var(--hue); stroke-width: 1.8 } .dot { fill: var(--hue) }
.area { fill: var(--hue); opacity: .8 }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em;
       background: var(--hue) }
"""


def html_report(summary: Line, lines: Sequence[Line], served: Sequence[Line], settings: str) -> str:
    """The page. A run without a step has figures and no pictures."""
    name = escape(str(summary["name"]))
    parts = [f"<h1>Run {name}</h1>", opening(summary, lines, settings)]
    if of_kind(lines, "step"):
        parts += [headline(summary), notes_section(summary), *_learning(lines), *_throughput(lines)]
        parts += [*_serving(lines, served, settings), *_who(lines), *cost_section(summary)]
    else:
        parts.append(notes_section(summary))
    parts += ["<h2>Figures</h2>", figures_table(summary), steps_table(lines)]
    parts.append(f"<details><summary>Settings</summary><pre>{escape(settings)}</pre></details>")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>ROSE run {name}</title>'
    icon = '<link rel="icon" href="data:,">'
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head>{head}{icon}<style>{STYLE}</style></head>\n'
        f"<body>\n{chr(10).join(parts)}\n</body></html>\n"
    )


def _learning(lines: Sequence[Line]) -> list[str]:
    steps, evaluations = of_kind(lines, "step"), of_kind(lines, "evaluation")
    last = max([step["step"] for step in steps] + [evaluation["step"] for evaluation in evaluations])
    picture = Picture("Learning curve", (0, last), (0, 1), "step", y_format="{:.0%}")
    rates = [(step["step"], step["successes"] / max(1, step["trajectories"])) for step in steps]
    held_out = [(evaluation["step"], evaluation["success_rate"]) for evaluation in evaluations]
    picture.line(rates, "learning")
    picture.line(held_out, "heldout")
    picture.dots(held_out, "heldout")
    return _section(
        "Learning", "Success rate.", ["learning:on training maps", "heldout:on held-out maps"], picture.svg()
    )


def _throughput(lines: Sequence[Line]) -> list[str]:
    """Stacked: the borrowed device on top of the dedicated worker."""
    samples, begin_s, end_s = of_kind(lines, "sample"), *_span(lines)
    bins = _binned_turns(samples, begin_s, end_s)
    width_s = (end_s - begin_s) / len(bins)
    highest = max((dedicated + borrowed for dedicated, borrowed in bins), default=0.0)
    picture = Picture("Throughput by pool", (0, end_s - begin_s), (0, round_up(highest)), "seconds")
    middles = [(place + 0.5) * width_s for place in range(len(bins))]
    floor = [(x, 0.0) for x in middles]
    first = [(x, dedicated) for x, (dedicated, _) in zip(middles, bins)]
    both = [(x, dedicated + borrowed) for x, (dedicated, borrowed) in zip(middles, bins)]
    picture.area(first, floor, "dedicated")
    picture.area(both, first, "borrowed")
    keys = ["dedicated:dedicated worker", "borrowed:borrowed device"]
    return _section("Throughput by pool", "Turns per second; valleys are learning.", keys, picture.svg())


def _binned_turns(samples: Sequence[Line], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    """Turns per second of each pool; what ended between two looks is spread over the time between them."""
    count = _bins(end_s - begin_s)
    width_s = (end_s - begin_s) / count
    totals = [[0.0, 0.0] for _ in range(count)]
    for before, after in itertools.pairwise(samples):
        if after["at_s"] <= before["at_s"]:
            continue
        middle_s = (before["at_s"] + after["at_s"]) / 2
        place = int((middle_s - begin_s) / width_s)
        if 0 <= place < count:
            for row, kind in enumerate(("dedicated", "borrowed")):
                totals[place][row] += after["turns"][kind] - before["turns"][kind]
    return [(dedicated / width_s, borrowed / width_s) for dedicated, borrowed in totals]


def _serving(lines: Sequence[Line], served: Sequence[Line], settings: str) -> list[str]:
    begin_s, end_s = _span(lines)
    budgets = {"ttft_ms": _budget(settings, "ttft_ms", 500.0), "tpot_ms": _budget(settings, "tpot_ms", 150.0)}
    parts = []
    for key, name in (("ttft_ms", "Time to first token, ms"), ("tpot_ms", "Time per token, ms")):
        tails, medians = _tails(served, key, begin_s, end_s)
        values = [value for _, value in tails + medians] + [budgets[key]]
        low, high = 10.0 ** math.floor(math.log10(max(0.01, min(values)))), 10.0 ** math.ceil(math.log10(max(values)))
        picture = Picture(name, (0, end_s - begin_s), (low, max(high, low * 10)), "seconds", 190, is_log=True)
        picture.line(medians, "median")
        picture.line(tails, "learning")
        picture.dots([(x, y) for x, y in tails if y > budgets[key]], "heldout")
        picture.level(budgets[key], f"budget {budgets[key]:g} ms")
        keys = f"{_key('learning')}P99 of every interval{_key('median')}median"
        parts.append(f"<p>{name}.{keys}</p>{picture.svg()}")
    return ["<h2>Serving: P99 against its budget</h2>", *parts]


def _tails(served: Sequence[Line], key: str, begin_s: float, end_s: float) -> tuple[list[Any], list[Any]]:
    count = _bins(end_s - begin_s)
    width_s = (end_s - begin_s) / count
    bins: list[list[float]] = [[] for _ in range(count)]
    for row in served:
        place = int((row["at_s"] - begin_s) / width_s)
        if 0 <= place < count and row[key] is not None:
            bins[place].append(row[key])
    middles = [(place + 0.5) * width_s for place in range(count)]
    tails = [(x, max(1e-3, percentile(values, 99) or 0.0)) for x, values in zip(middles, bins) if values]
    medians = [(x, max(1e-3, percentile(values, 50) or 0.0)) for x, values in zip(middles, bins) if values]
    return tails, medians


def _who(lines: Sequence[Line]) -> list[str]:
    begin_s, end_s = _span(lines)
    rows = ("borrowed", "dedicated", "trainer", "weights", "evaluation")
    picture = Picture("Who ran what when", (0, end_s - begin_s), (0, len(rows)), "seconds", 190)
    for row, kind, blocks in _blocks(lines):
        place = len(rows) - 1 - rows.index(row)
        for from_s, to_s, told in _joined(blocks, (end_s - begin_s) / COLUMNS):
            words = f"{sum(told)} turns" if row in POOLS else " to ".join(dict.fromkeys((told[0], told[-1])))
            picture.block(from_s - begin_s, to_s - begin_s, place + 0.15, place + 0.85, kind, words)
    for death in of_kind(lines, "death"):
        picture.mark(death["at_s"] - begin_s, f"{death['role']} died")
    keys = [
        "borrowed:borrowed",
        "dedicated:dedicated",
        "trainer:learning",
        "publishing:publishing",
        "evaluation:evaluation",
    ]
    return _section("Who ran what when", "A dashed line is the death of a process.", keys, picture.svg(rows))


def _blocks(lines: Sequence[Line]) -> Iterator[tuple[str, str, list[Block]]]:
    """Rows of blocks, each with its name and its colour."""
    for pool in POOLS:
        ended = [
            (before["at_s"], after["at_s"], after["turns"][pool] - before["turns"][pool])
            for before, after in itertools.pairwise(of_kind(lines, "sample"))
        ]
        yield pool, pool, [block for block in ended if block[2] > 0]
    learning: list[Block] = []
    publishing: list[Block] = []
    for step in of_kind(lines, "step"):
        played_s = step.get("train_began_s", step["began_s"] + step["rollout_s"])
        learnt_s = played_s + step["train_s"]
        learning.append((played_s, learnt_s, f"step {step['step']}"))
        publishing.append((learnt_s, learnt_s + step["publish_s"], f"version {step['version']}"))
    yield "trainer", "trainer", learning
    yield "weights", "publishing", publishing
    evaluations = [
        (found["began_s"], found["began_s"] + found["took_s"], f"{found['success_rate']:.1%}")
        for found in of_kind(lines, "evaluation")
    ]
    yield "evaluation", "evaluation", evaluations


def _joined(blocks: Iterable[Block], width_s: float) -> list[tuple[float, float, list[Any]]]:
    """Those that begin within `width_s` of each other are one: the eye sees no more, and a page has to stay small."""
    found: list[tuple[float, float, list[Any]]] = []
    for from_s, to_s, what in sorted(blocks, key=lambda block: block[0]):
        if found and from_s - found[-1][0] < width_s:
            begin_s, end_s, told = found[-1]
            told.append(what)
            found[-1] = (begin_s, max(end_s, to_s), told)
        else:
            found.append((from_s, to_s, [what]))
    return found


def _section(title: str, words: str, keys: Sequence[str], svg: str) -> list[str]:
    shown = "".join(_key(kind) + escape(label) for kind, _, label in (key.partition(":") for key in keys))
    return [f"<h2>{escape(title)}</h2>", f"<p>{escape(words)}{shown}</p>", svg]


def _key(kind: str) -> str:
    return f'<span class="key {kind}"></span>'


def _span(lines: Sequence[Line]) -> tuple[float, float]:
    """From the first thing that was measured to the last, in seconds of the shared clock."""
    moments = [line["at_s"] for line in of_kind(lines, "sample")]
    for line in [*of_kind(lines, "step"), *of_kind(lines, "evaluation")]:
        moments += [line["began_s"], line["began_s"] + (line.get("step_s") or line.get("took_s") or 0.0)]
    return min(moments), max(max(moments), min(moments) + 1e-3)


def _bins(seconds: float) -> int:
    return max(1, min(BINS, int(seconds / BIN_S_MIN)))


def _budget(settings: str, key: str, default: float) -> float:
    """As the settings in force say it."""
    for line in settings.splitlines():
        name, _, value = line.strip().partition(": ")
        if name == key:
            return float(value)
    return default
