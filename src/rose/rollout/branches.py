"""A finished trajectory as it is learnt from: every line of its turns, from a first prompt to a last answer.

A turn that goes on from an earlier one begins with that one's prompt and answer, token by token, so a line of turns is
one line of tokens. Where two turns go on from the same one the trajectory has forked, and there are two lines; each
sampled token carries a loss in one of them only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rose.core.trajectory import NO_VERSION, Trajectory

if TYPE_CHECKING:
    from rose.rollout.sessions import KeptTurn, Session


def branches(session: Session, group_id: str) -> list[Trajectory]:
    """Every line of turns from a first prompt to an answer that nothing goes on from."""
    counted: set[KeptTurn] = set()
    found = []
    for number, leaf in enumerate(leaves(session.turns)):
        name = session.trajectory_id if number == 0 else f"{session.trajectory_id}~{number}"
        found.append(_branch(session, name, group_id, _line(leaf), counted))
    return found


def leaves(turns: Sequence[KeptTurn]) -> list[KeptTurn]:
    """The turns that have ended and that none goes on from."""
    ended = [turn for turn in turns if turn.finish_reason is not None]
    parents = {turn.parent for turn in ended}
    return [turn for turn in ended if turn not in parents]


def _line(leaf: KeptTurn) -> list[KeptTurn]:
    line = [leaf]
    while line[-1].parent is not None:
        line.append(line[-1].parent)
    return line[::-1]


def _branch(session: Session, name: str, group_id: str, line: Sequence[KeptTurn], counted: set[KeptTurn]) -> Trajectory:
    assert session.finish is not None
    ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[str] = []
    for turn in line:
        context = turn.prompt_ids[len(ids) :]
        produced = turn.produced
        ids += [*context, *produced.token_ids]
        mask += [False] * len(context) + [turn not in counted] * len(produced)
        logprobs += [0.0] * len(context) + produced.logprobs
        versions += [NO_VERSION] * len(context)
        for span in produced.spans:
            versions += [span.version] * (span.end - span.start)
    counted.update(line)
    finish = session.finish
    return Trajectory(
        name,
        group_id,
        tuple(ids),
        tuple(mask),
        tuple(logprobs),
        tuple(versions),
        finish.reward,
        finish.is_success,
        len(line),
        finish.invalid_turns,
    )
