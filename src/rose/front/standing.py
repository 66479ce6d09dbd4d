"""What holds for lending whichever engine runs: what the owner said, and whether rollouts are held back.

An engine that dies forgets what it was told. The next one hears it with its start command and obeys before its first
step, so there is no moment in which it lends against the owner's word. Rollouts run in the engine's process and may be
what kills it: if it was lent and died soon after its start, twice in a row, the next one starts with rollouts held back
until the owner says `resume`. A death of an engine that was lent is no reason to give up serving; one that was not is.

A held back model is loaded all the same, so that `resume` is quick. If an engine does not even get ready, the model's
folder may be gone or its loading be fatal: the next one is started without it, and serves. If that fails too it was
not the rollout model, and lending is tried again.
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
REMOVED = "the engine could not be restarted with the rollout model and serves without it: {why}"


class StandingOrders:
    """One per device. Tell it what the owner said and how engines died; every new engine gets `lend`."""

    def __init__(self, lend: messages.Lend | None) -> None:
        self.removed = ""  # why the next engine is started without the rollout model
        self._lend = lend
        self._words: dict[str, messages.Control] = {}  # by action, in the order in which they were last said
        self._held_back = ""
        self._deaths = 0  # in a row: soon after the start, and lent

    @property
    def lend(self) -> messages.Lend | None:
        """On what terms the next engine is lent; None if it is not."""
        return None if self.removed else self.told

    @property
    def told(self) -> messages.Lend | None:
        """On what terms it would be; None if the device never is."""
        if self._lend is None:
            return None
        return msgspec.structs.replace(self._lend, words=tuple(self._words.values()), held_back=self._held_back)

    @property
    def is_lending(self) -> bool:
        """Rollouts may run: they may be what kills the engine."""
        return self.lend is not None and not self._held_back and not any(word in STOPS for word in self._words)

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

    def died(self, *, is_quick: bool, unready: str = "") -> bool:
        """An engine, soon after its start or not, or before it was ready for this reason; whether it was lent."""
        was_lent = self.is_lending
        if unready:
            self._change_sides(unready)
        elif not is_quick:
            self._deaths = 0
        elif was_lent:
            self._deaths += 1
        if was_lent and self._deaths >= LENT_DEATHS_MAX:
            logger.error(HELD_BACK)
            self._held_back = HELD_BACK
        return was_lent

    def _change_sides(self, why: str) -> None:
        if self._lend is None:
            return
        self.removed = "" if self.removed else REMOVED.format(why=why)
        if self.removed:
            logger.error("%s: the next one is started without the rollout model", why)
