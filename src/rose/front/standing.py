"""What holds for lending whichever engine runs: what the owner said, and whether rollouts are held back.

An engine that dies forgets what it was told. The next one hears it with its start command and obeys before its first
step, so there is no moment in which it lends against the owner's word. Rollouts run in the engine's process and may be
what kills it: if it was lent and died soon after its start, twice in a row, the next one starts with rollouts held back
until the owner says `resume`. A death of an engine that was lent is no reason to give up serving; one that was not is.
"""

from __future__ import annotations

import logging

import msgspec

from rose.coserve import messages

logger = logging.getLogger("rose.front")

STOPS = ("pause", "drain", "remove", "dry_run")
LENT_DEATHS_MAX = 2  # one may be chance; every further one costs serving its requests
HELD_BACK = (
    "the engine died twice in a row soon after its start while it was lent: rollouts are held back; "
    "`rose lend resume` tries again"
)


class StandingOrders:
    """One per device. Tell it what the owner said and how engines died; every new engine gets `lend`."""

    def __init__(self, lend: messages.Lend | None) -> None:
        self._lend = lend
        self._words: dict[str, messages.Control] = {}  # by action, in the order in which they were last said
        self._held_back = ""
        self._deaths = 0  # in a row: soon after the start, and lent

    @property
    def lend(self) -> messages.Lend | None:
        """On what terms the next engine is lent; None if it is not."""
        if self._lend is None:
            return None
        return msgspec.structs.replace(self._lend, words=tuple(self._words.values()), held_back=self._held_back)

    @property
    def is_lending(self) -> bool:
        """Rollouts may run: they may be what kills the engine."""
        return self._lend is not None and not self._held_back and not any(word in STOPS for word in self._words)

    def said(self, word: messages.Control) -> None:
        """By the owner."""
        before = self._words.get(word.action, word)
        if word.action in STOPS:
            self._words.pop(word.action, None)
            self._words[word.action] = word
        elif word.action == "limits":
            memory_share = before.memory_share if word.memory_share is None else word.memory_share
            compute_share = before.compute_share if word.compute_share is None else word.compute_share
            self._words["limits"] = messages.Control("limits", memory_share, compute_share)
        elif word.action == "resume":
            for stop in STOPS:
                self._words.pop(stop, None)
            self._held_back, self._deaths = "", 0

    def died(self, *, is_quick: bool) -> bool:
        """An engine, soon after its start or not; whether it was lent."""
        was_lent = self.is_lending
        if not is_quick:
            self._deaths = 0
        elif was_lent:
            self._deaths += 1
        if was_lent and self._deaths >= LENT_DEATHS_MAX:
            logger.error(HELD_BACK)
            self._held_back = HELD_BACK
        return was_lent
