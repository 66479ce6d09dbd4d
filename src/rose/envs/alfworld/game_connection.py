"""Connections to games, which a process of its own plays (game_host.py).

That process starts with the first game, is restarted if it died, and ends with this one.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from rose.envs.environment import EnvironmentFailed
from rose.errors import ConfigError
from rose.private_files import without_secrets

PACKAGES = ("alfworld", "textworld", "fast_downward")
START_S_MAX = 60.0
"""Importing TextWorld takes two seconds, more on a busy machine."""

ANSWER_S_MAX = 25.0
"""A game answers within a second; one that takes this long hangs. Less than what is usually waited for a step."""

LINE_BYTES_MAX = 16 << 20  # an answer is some kilobytes of text


def check_packages() -> None:
    """Raise a ConfigError that says how to get what is missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"ALFWorld needs packages that are not installed ({', '.join(missing)})",
            hint="pip install 'rose-rl[alfworld]' (Fast Downward is compiled: it needs g++, make and cmake)",
        )


class GameConnection:
    """One game in a process of its own. Not thread-safe, except for `close`."""

    def __init__(
        self, request: dict[str, Any], answer_s_max: float = ANSWER_S_MAX, begin_s_max: float = START_S_MAX
    ) -> None:
        self._pid: int | None = None
        self._socket = _host.connect()
        self._socket.settimeout(START_S_MAX)
        self._stream = self._socket.makefile("rwb")
        self._pid = self._exchange()["pid"]
        self._socket.settimeout(begin_s_max)
        self.first = self.ask(request)
        self._socket.settimeout(answer_s_max)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer. Raises EnvironmentFailed or TimeoutError; then the game is over."""
        return self._exchange(json.dumps(request).encode() + b"\n")

    def _exchange(self, request: bytes = b"") -> dict[str, Any]:
        """Send a line, or nothing, and return the game's next answer."""
        try:
            self._stream.write(request)
            self._stream.flush()
            line = self._stream.readline(LINE_BYTES_MAX)
        except TimeoutError:
            self.kill()
            raise
        except (OSError, ValueError) as error:
            self.close()
            raise EnvironmentFailed(f"a game's process cannot be reached: {error}") from error
        try:
            if not line.endswith(b"\n"):
                raise EnvironmentFailed("a game's process died")
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise EnvironmentFailed(f"a game failed: {answer['error']}")
        except (ValueError, RecursionError) as error:
            self.close()
            raise EnvironmentFailed(f"a game's process sent no JSON: {error}") from error
        except EnvironmentFailed:
            self.close()
            raise
        return answer

    def kill(self) -> None:
        """End a game that does not answer."""
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Disconnect; the game then ends by itself."""
        with contextlib.suppress(OSError, ValueError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, ValueError):
            self._stream.close()
        self._socket.close()


class GameHost:
    """The process that games are forked from."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def connect(self) -> socket.socket:
        """Return a connection to a new game. Raises EnvironmentFailed if a restarted host cannot be reached either."""
        try:
            return self._connect()
        except OSError:
            self.end()
        try:
            return self._connect()
        except OSError as error:
            last_line = ""
            with contextlib.suppress(OSError):
                if self._folder is not None and (log := (self._folder / "errors").read_text().strip()):
                    last_line = f" ({log.splitlines()[-1][:200]})"
            raise EnvironmentFailed(f"the games' process cannot be reached: {error}{last_line}") from error

    def end(self) -> None:
        """End the process, and with it every game."""
        with self._lock:
            self._end()

    def _connect(self) -> socket.socket:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            assert self._folder is not None
            path = str(self._folder / "games")
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(START_S_MAX)
            connection.connect(path)
        except OSError:
            connection.close()
            raise
        return connection

    def _start(self) -> None:
        check_packages()
        self._folder = Path(tempfile.mkdtemp(prefix="rose-games-"))
        with socket.socket(socket.AF_UNIX) as listener, open(self._folder / "errors", "wb") as errors:
            listener.bind(str(self._folder / "games"))
            listener.listen(1024)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rose.envs.alfworld.game_host", str(listener.fileno()), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=[listener.fileno()],
                env=without_secrets(os.environ),
            )

    def _end(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


_host = GameHost()
atexit.register(_host.end)
