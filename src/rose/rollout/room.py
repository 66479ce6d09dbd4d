"""How much memory agents may make the gateway keep: bytes over all trajectories, and of one trajectory.

Sizes are estimates from what was sent (ids and text of prompts), so they bound memory within a small factor. Content is
counted until its trajectory is handed out, so a trainer that takes no batches slows agents down instead of filling the
memory.
"""

from __future__ import annotations

from rose.errors import QueueFull

RETRY_AFTER_S = 5.0
MIB = 1 << 20


class Room:
    """One per gateway, shared by its sessions."""

    def __init__(self, most_bytes: int = 1 << 62, session_most_bytes: int = 1 << 62) -> None:
        self.used_bytes = 0
        self._most, self._session_most = most_bytes, session_most_bytes

    def check(self, session_bytes: int, more_bytes: int) -> None:
        """Raises QueueFull if a session of this size may not keep so much more."""
        if self.used_bytes + more_bytes > self._most:
            what = f"the gateway keeps {self.used_bytes // MIB} MiB of turns, and the most is {self._most // MIB} MiB"
            hint = "finish trajectories and take batches, or raise max_kept_mb"
            raise QueueFull(what, hint=hint, retry_after_s=RETRY_AFTER_S)
        if session_bytes + more_bytes > self._session_most:
            what = f"this trajectory holds {session_bytes // MIB} MiB, and the most is {self._session_most // MIB} MiB"
            hint = "finish it and begin another one, or raise max_session_mb"
            raise QueueFull(what, hint=hint, retry_after_s=RETRY_AFTER_S)

    def take(self, size_bytes: int) -> None:
        """Count bytes; a negative number gives them back."""
        self.used_bytes += size_bytes

    def give(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
