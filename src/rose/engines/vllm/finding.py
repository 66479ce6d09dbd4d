"""Where boards are, and which of them belongs to the server at an address.

Every serving engine writes its board into one folder of its user, in memory, named by its process id. The server at an
address is whoever listens at its port; its engine is that process or one of its children. Nobody has to be told a
name.

A process id means nothing without its namespace, so names have both: containers may share the folder, and none sees
whether another's processes live.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rose.engines.vllm.board import About, BoardReader
from rose.errors import ConfigError, Unavailable
from rose.private_files import make_private_folder

FOLDER_VARIABLE = "ROSE_BOARDS"
LISTENING = "0A"
NAMED = re.compile(r"(?:desk-)?(\d+)-(\d+)(?:\.board|-\w+)")  # by namespace and process


def folder() -> Path:
    given = os.environ.get(FOLDER_VARIABLE)
    return Path(given) if given else Path("/dev/shm") / f"rose-{os.getuid()}"


def own_folder() -> Path:
    """Return the folder, made if it is not there. Raises ConfigError for a link or a folder of another user."""
    found = folder()
    try:
        make_private_folder(found)
    except OSError as error:
        hint = f"name a folder of your own in {FOLDER_VARIABLE}"
        raise ConfigError(f"{found} cannot be used: {error}", hint=hint) from error
    return found


def new_board_path() -> Path:
    """For this process; what dead ones left is removed on the way."""
    sweep()
    return own_folder() / f"{own_name()}.board"


def own_name() -> str:
    """Of this process, as none is called that may share the folder."""
    return f"{_namespace()}-{os.getpid()}"


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return "0"


def sweep() -> None:
    """Boards and desks that dead processes have left, of this namespace: of others nobody here knows who is dead."""
    for path in own_folder().iterdir():
        match = NAMED.fullmatch(path.name)
        if match and match[1] == _namespace() and not Path(f"/proc/{match[2]}").exists():
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def boards() -> list[tuple[Path, About]]:
    """Every board of this user whose engine lives, and can be seen from here to live."""
    found = []
    for path in sorted(folder().glob(f"{_namespace()}-*.board")):
        with suppress(Unavailable):
            reader = BoardReader(path)
            if reader.is_alive:
                found.append((path, reader.about))
            reader.close()
    return found


def is_shown(path: Path) -> bool:
    """Whether a board's engine lives, which another process of the same id is not."""
    with suppress(Unavailable):
        BoardReader(path).close()
        return True
    return False


def port_of(serving_url: str) -> int:
    parts = urlsplit(serving_url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def board_of(serving_url: str) -> Path:
    """Of the server at this address. Raises Unavailable if nobody listens there, ConfigError unless it shows one."""
    port = port_of(serving_url)
    sockets = _listening(port)
    if not sockets:
        raise Unavailable(f"nobody listens at port {port} of this machine", hint="is the serving engine up?")
    found = [
        path
        for path, about in boards()
        if any(_holds(process_id, sockets) for process_id in _with_parents(about.process_id))
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"the server at {serving_url} has {len(found)} engines, and what one of them shows says nothing of the "
            "devices of the others",
            hint="instead of data parallelism start a `vllm serve` of its own for every device, and lend each",
        )
    raise ConfigError(
        f"the server at {serving_url} shows no board, so it cannot be lent safely",
        hint="restart it with --scheduler-cls rose.engines.vllm.ServingScheduler (on a GPU: AsyncServingScheduler), as "
        "the same user, on this machine and in the same container",
    )


def _listening(port: int) -> set[str]:
    """What /proc/PID/fd shows of sockets that listen at a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _holds(process_id: int, sockets: set[str]) -> bool:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor) in sockets:
                    return True
    return False


def _with_parents(process_id: int) -> list[int]:
    found = []
    while process_id > 1:
        found.append(process_id)
        try:
            process_id = int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return found
