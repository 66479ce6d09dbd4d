"""The format of log lines: UTC first, plain or JSON, the same in every process.

    2026-11-19T23:31:58.123456Z WARNING rose.gateway: the ledger cannot be written
    {"utc": "2026-11-19T23:31:58.123456Z", "level": "WARNING", "logger": "rose.gateway", "message": "..."}

The choice travels to the processes that a command starts by the environment variable ROSE_LOG_FORMAT.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from rose.observe.wall_clock import utc_text

FORMAT_VARIABLE = "ROSE_LOG_FORMAT"
PLAIN, JSON = FORMATS = ("plain", "json")


class UtcFormatter(logging.Formatter):
    """Formatter of log lines with UTC; `as_json` makes each line one object. `role` says which process it is."""

    def __init__(self, *, as_json: bool, role: str = "") -> None:
        super().__init__()
        self._as_json, self._role = as_json, role

    def format(self, record: logging.LogRecord) -> str:
        utc, message = utc_text(record.created), record.getMessage()
        trouble = self.formatException(record.exc_info) if record.exc_info else ""
        if self._as_json:
            line = {"utc": utc, "level": record.levelname, "logger": record.name, "message": message}
            extra = {"role": self._role, "traceback": trouble}
            return json.dumps(line | {name: value for name, value in extra.items() if value})
        where = f"{record.name} ({self._role})" if self._role else record.name
        return "\n".join(filter(None, (f"{utc} {record.levelname} {where}: {message}", trouble)))


def configure_logs(level: int = logging.WARNING, role: str = "") -> None:
    """Send log lines of this process to standard error, in the format that the environment chooses."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(UtcFormatter(as_json=os.environ.get(FORMAT_VARIABLE) == JSON, role=role))
    logging.basicConfig(level=level, handlers=[handler])


def choose_format(name: str | None) -> None:
    """Set the format for this process and those that it starts; None leaves what the environment says."""
    if name is not None:
        os.environ[FORMAT_VARIABLE] = name
