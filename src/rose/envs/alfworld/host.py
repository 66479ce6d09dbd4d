"""The games' own process: reads the rules once, then forks for every game.

    python -m rose.envs.alfworld.host LISTENING_FD FOLDER

A game is foreign code that computes for tenths of a second, keeps its state in the global variables of a C++ library,
redirects standard output and may hang or crash. So it is played apart: a connection to the listening socket is a game,
in a forked process that shares everything read so far and adds little memory of its own. It ends with its connection,
and at the latest with this process. Whoever waits too long kills it by its process id, which it tells before it begins.

Messages are lines of JSON. The game says `{pid}` first. It is asked `{problem, task}` or `{file}`, answered by what is
seen; then `{command}`, answered by what is seen, or `{plan: true}`, answered by the expert's commands. An error is
answered as `{error}` and ends the game. The process ends with its standard input, which is its parent's life, and takes
the folder of its socket with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import sys
from dataclasses import asdict
from io import BufferedRWPair
from typing import Any

import fast_downward

from rose.envs.alfworld.game import Game, Rules, packaged_rules

NICE = 10
"""As rollouts and training: what serves users goes first."""

LINE_BYTES_MAX = 16 << 20
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main(listening_fd: int, folder: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended games need nobody to wait for them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when the end has come
    os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))
    rules, library = packaged_rules(), fast_downward.load_lib()
    listener, own_pid = socket.socket(fileno=listening_fd), os.getpid()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                shutil.rmtree(folder, ignore_errors=True)
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                end_with(own_pid)
                listener.close()
                serve(connection, rules, library)
                os._exit(0)
            connection.close()


def end_with(parent_pid: int) -> None:
    """A game that hangs would not see that everybody else has gone: the kernel ends it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the line above
        os._exit(1)


def serve(connection: socket.socket, rules: Rules, library: Any) -> None:
    """One game, until its connection ends."""
    with connection, connection.makefile("rwb") as stream:
        game: Game | None = None
        if not is_told(stream, {"pid": os.getpid()}):
            return
        while line := stream.readline(LINE_BYTES_MAX):
            try:
                wish = json.loads(line)
                if game is None:
                    game, answer = begun(wish, rules, library)
                else:
                    answer = obeyed(game, wish)
            except (Exception, SystemExit) as error:
                answer = {"error": f"{type(error).__name__}: {error}"[:500]}
            if not is_told(stream, answer) or "error" in answer:
                return


def is_told(stream: BufferedRWPair, answer: dict[str, Any]) -> bool:
    """Whether somebody is there to hear it."""
    try:
        stream.write(json.dumps(answer).encode() + b"\n")
        stream.flush()
    except OSError:
        return False
    return True


def begun(wish: dict[str, Any], rules: Rules, library: Any) -> tuple[Game, dict[str, Any]]:
    task = wish.get("task", "")
    if "file" in wish:
        with open(wish["file"], encoding="utf-8") as file:
            data = json.load(file)
        rules, problem = Rules(data["pddl_domain"], data["grammar"]), data["pddl_problem"]
    else:
        problem = wish["problem"]
    game = Game(library, rules, problem, task)
    return game, asdict(game.begin())


def obeyed(game: Game, wish: dict[str, Any]) -> dict[str, Any]:
    if wish.get("plan"):
        return {"plan": game.plan()}
    return asdict(game.do(wish["command"]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
