"""Tokens wait until their worker has proved its weights.

A worker swaps its weights between two steps and says so a moment later, with their hash. What it draws in between comes
under the new name and with no hash that it could be judged by. Such tokens, and whatever follows them of the same turn,
are withheld: they are taken when the hash comes and is the published one, and dropped when it is another; the turn then
goes on from what it had. Nothing is lost either way, since a turn's tokens follow from its seed.
"""

from __future__ import annotations

from rose.errors import Unavailable
from rose.rollout.messages import Piece, Tokens
from rose.rollout.pool import Member, Pool

WITHHELD_MAX = 1 << 14  # a worker tells its hash within a moment of the first token


def proved(pool: Pool, member: Member, tokens: Tokens) -> Tokens:
    """Those that may be heard now, or be refused; the others are withheld."""
    if not member.withheld and all(_is_judged(pool, member, piece) for piece in tokens.pieces):
        return tokens
    passed, waiting = [], {piece.ticket for piece in member.withheld}
    for piece in tokens.pieces:
        if piece.ticket in waiting or not _is_judged(pool, member, piece):
            waiting.add(piece.ticket)
            member.withheld.append(piece)
            if len(member.withheld) > WITHHELD_MAX:
                raise Unavailable(f"{WITHHELD_MAX} pieces of tokens wait for the hash of their weights")
        else:
            passed.append(piece)
    return Tokens(tuple(passed))


def released(pool: Pool, member: Member) -> Tokens:
    """What can be judged by now, in the order it came."""
    held, member.withheld = member.withheld, []
    return proved(pool, member, Tokens(tuple(held)))


def _is_judged(pool: Pool, member: Member, piece: Piece) -> bool:
    return not piece.token_ids or pool.is_proved(member, piece.version) is not None
