"""The live page at `/ui`: its file, its events, and the trajectories that it shows.

The page is one document without a reference to any other address. A strict Content-Security-Policy allows only its own
script and style, by their hashes, and requests to the gateway. The page holds nothing private: it asks for a token and
sends it in a header. Events and trajectories need the operator's or the trainer's token.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec
from aiohttp import web

from rose.core.trajectory import Trajectory
from rose.gateway.gateway_server import Gateway
from rose.gateway.sessions import KeptTurn, Session
from rose.openai.http_errors import Failure
from rose.openai.loops import offload
from rose.openai.response_writing import EventStream, ReaderGone, json_response

FOLDER = Path(__file__).parent / "page"
SCRIPTS = ("charts.js", "fleet.js", "training.js", "trajectories.js", "app.js")
EVENT_S = 1.0  # between two events of a page, unless an order comes
PAGES_MAX = 16  # each costs some milliseconds of the event loop per second
TRAJECTORIES_SHOWN = 200
TOKENS_SHOWN = 1 << 14  # of one trajectory: about a megabyte of page


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers."""
    style = (FOLDER / "style.css").read_text(encoding="utf-8")
    script = "\n".join((FOLDER / name).read_text(encoding="utf-8") for name in SCRIPTS)
    text = (FOLDER / "page.html").read_text(encoding="utf-8")
    body = text.replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
    return body.encode(), headers


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


async def show_page(gateway: Gateway, request: web.Request) -> web.Response:
    body, headers = page()
    return web.Response(body=body, headers=headers)


async def events(gateway: Gateway, request: web.Request) -> web.StreamResponse:
    """Stream what changes in the pool until the page leaves or the gateway stops."""
    feed = gateway.feed
    if feed.pages >= PAGES_MAX:
        message = f"{PAGES_MAX} live pages are open, which is the most; close one"
        raise Failure(503, message, code="too_many_pages", headers={"Retry-After": "5"})
    stream = EventStream(request)
    feed.pages += 1
    seen = None
    try:
        await stream.open()
        while True:
            number = gateway.core.fleet.newest_number
            event, seen = feed.event(seen, gateway.now_s())
            await stream.send([event])
            await gateway.changes.wait_until(
                lambda known=number: True if gateway.core.fleet.newest_number != known else None,  # type: ignore[misc]
                EVENT_S,
            )
    except ReaderGone:
        return stream.response
    finally:
        feed.pages -= 1


class TrajectoryRow(msgspec.Struct):
    """One trajectory of the list. `state` is open, finished or lost."""

    id: str
    group: str
    task: str
    state: str
    turns: int
    tokens: int  # generated
    running: int  # turns under way
    workers: int  # that generated its tokens
    reward: float | None


class TrajectoryList(msgspec.Struct):
    """The newest trajectories that the gateway holds, and how many there are."""

    total: int
    trajectories: list[TrajectoryRow]


class ShownTokens(msgspec.Struct):
    """Tokens in one run: of the prompt (without a version) or sampled under one version."""

    version: str
    tokens: int
    text: str


class ShownTurn(msgspec.Struct):
    """One turn. `workers` is in the order in which they took part; each after the first is a migration."""

    ordinal: int
    parent: int | None
    workers: list[str]
    finish_reason: str | None
    is_running: bool
    cached_tokens: int | None
    segments: list[ShownTokens]


class ShownTrajectory(msgspec.Struct):
    """One trajectory. The workers of a turn are known until the trajectory's group is complete."""

    summary: TrajectoryRow
    turns: list[ShownTurn]
    is_cut: bool  # it has more tokens than are shown


async def trajectories(gateway: Gateway, request: web.Request) -> web.Response:
    table = gateway.core.trajectories
    rows = [_row_of(session) for session in table.newest(TRAJECTORIES_SHOWN)]
    return json_response(TrajectoryList(len(table), rows))


async def trajectory(gateway: Gateway, request: web.Request) -> web.Response:
    name = request.match_info["trajectory"]
    session = gateway.core.trajectories.get(name)
    if session is None:
        raise Failure(404, f"the gateway holds no trajectory `{name[:80]}`", code="not_found")
    turns = [_turn_of(turn) for turn in session.turns] or _turns_of_record(session)
    room, is_cut = TOKENS_SHOWN, False
    parts: list[tuple[ShownTokens, Sequence[int]]] = []
    for _, pieces in turns:
        for segment, ids in pieces:
            is_cut |= len(ids) > room
            parts.append((segment, ids[:room]))
            room -= min(room, len(ids))
    texts = await offload(gateway.context.tokenizer.decode_many, [list(ids) for _, ids in parts]) if parts else []
    for (segment, _), text in zip(parts, texts):
        segment.text = text
    return json_response(ShownTrajectory(_row_of(session), [shown for shown, _ in turns], is_cut))


Pieces = list[tuple[ShownTokens, Sequence[int]]]


def _row_of(session: Session) -> TrajectoryRow:
    finish, turns = session.finish, session.turns
    state = "open" if finish is None else "lost" if finish.is_lost else "finished"
    record = _record_of(session)
    return TrajectoryRow(
        id=session.trajectory_id,
        group=session.group_id or "",
        task=session.task[:200],
        state=state,
        turns=session.turn_count or len(turns),
        tokens=sum(len(turn.produced) for turn in turns) if turns or record is None else record.generated_tokens,
        running=sum(turn.is_running for turn in turns),
        workers=len({worker for turn in turns for worker in turn.produced.workers}),
        reward=finish.reward if finish is not None and not finish.is_lost else None,
    )


def _turn_of(turn: KeptTurn) -> tuple[ShownTurn, Pieces]:
    parent, produced = turn.parent, turn.produced
    context = turn.prompt_ids[parent.sequence_tokens if parent is not None else 0 :]
    pieces: Pieces = [(ShownTokens("", len(context), ""), context)] if context else []
    for span in produced.spans:
        pieces.append((ShownTokens(span.version, span.end - span.start, ""), produced.token_ids[span.start : span.end]))
    shown = ShownTurn(
        turn.ordinal,
        parent.ordinal if parent is not None else None,
        list(produced.workers),
        turn.finish_reason,
        turn.is_running,
        produced.cached_tokens,
        [segment for segment, _ in pieces],
    )
    return shown, pieces


def _turns_of_record(session: Session) -> list[tuple[ShownTurn, Pieces]]:
    """Return the tokens of a finished trajectory as one turn: its group is complete, and its turns are forgotten."""
    record = _record_of(session)
    if record is None:
        return []
    pieces: Pieces = []
    start = 0
    for place in range(1, len(record.token_ids) + 1):
        if place == len(record.token_ids) or record.versions[place] != record.versions[start]:
            pieces.append((ShownTokens(record.versions[start], place - start, ""), record.token_ids[start:place]))
            start = place
    return [(ShownTurn(0, None, [], "stop", False, None, [segment for segment, _ in pieces]), pieces)]


def _record_of(session: Session) -> Trajectory | None:
    group = session.group
    if group is None or group.finished is None:
        return None
    return next((one for one in group.finished.trajectories if one.trajectory_id == session.trajectory_id), None)
