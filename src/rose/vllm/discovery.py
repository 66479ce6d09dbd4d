"""Find the status segment of the server at an address, among those that serving engines write.

Every serving engine writes its segment into one folder of its user, in memory. The server at an address is the process
that listens at its port; its engine is that process or one of its children. So no name has to be configured. A process
id means nothing outside its namespace, and containers may share the folder: so names of files have both.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rose.errors import ConfigError, Unavailable
from rose.private_files import make_private_folder
from rose.vllm.status_segment import SegmentHeader, SegmentReader

FOLDER_VARIABLE = "ROSE_BOARDS"
LISTENING = "0A"  # a state of /proc/net/tcp
FILE_NAME = re.compile(r"(?:desk-|pool-)?(\d+)-(\d+)(?:\.board|-\w+)?")  # by namespace and process


def segment_folder() -> Path:
    """Return the folder of this user's segments."""
    configured = os.environ.get(FOLDER_VARIABLE)
    return Path(configured) if configured else Path("/dev/shm") / f"rose-{os.getuid()}"


def own_folder() -> Path:
    """Return the folder, made if it is not there. Raises ConfigError for a link or a folder of another user."""
    folder = segment_folder()
    try:
        make_private_folder(folder)
    except OSError as error:
        hint = f"name a folder of your own in {FOLDER_VARIABLE}"
        raise ConfigError(f"{folder} cannot be used: {error}", hint=hint) from error
    return folder


def new_segment_path() -> Path:
    """Return the path of this process's segment, and remove what dead processes left."""
    remove_dead_segments()
    return own_folder() / f"{own_name()}.board"


def new_pool_folder() -> Path:
    """Return the path of this process's pool of KV pages, and remove what dead processes left."""
    remove_dead_segments()
    return own_folder() / f"pool-{own_name()}"


def own_name() -> str:
    """Return a name of this process that no other one sharing the folder has."""
    return f"{_namespace()}-{os.getpid()}"


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return "0"


def remove_dead_segments() -> None:
    """Remove what dead processes of this pid namespace left; of others it cannot be known which are dead."""
    for path in own_folder().iterdir():
        match = FILE_NAME.fullmatch(path.name)
        if match and match[1] == _namespace() and not Path(f"/proc/{match[2]}").exists():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def live_segments() -> list[tuple[Path, SegmentHeader]]:
    """Return the status segments of this user whose engine is known to live."""
    segments = []
    for path in sorted(segment_folder().glob(f"{_namespace()}-*.board")):
        with suppress(Unavailable):
            reader = SegmentReader(path)
            if reader.is_alive:
                segments.append((path, reader.header))
            reader.close()
    return segments


def is_live(path: Path) -> bool:
    """Return whether a segment's engine lives; another process with its id does not count."""
    with suppress(Unavailable):
        SegmentReader(path).close()
        return True
    return False


def port_of(serving_url: str) -> int:
    """Return the port of a URL, or the usual one of its scheme."""
    parts = urlsplit(serving_url)
    return parts.port or (443 if parts.scheme == "https" else 80)


def find_segment(serving_url: str, replica: int | None = None) -> Path:
    """Return the segment of the server at this address, or of one of its replicas.

    Raises Unavailable or, without a segment, ConfigError.
    """
    port = port_of(serving_url)
    sockets = _listening(port)
    if not sockets:
        raise Unavailable(f"no server listens at port {port} of this machine", hint="is the serving engine up?")
    engines = [
        (path, header)
        for path, header in live_segments()
        if any(_holds(process_id, sockets) for process_id in _with_parents(header.process_id))
    ]
    chosen = [(path, header) for path, header in engines if replica in (None, header.replica)]
    if len(chosen) == 1:
        path, header = chosen[0]
        if header.is_lockstep:
            raise ConfigError(
                f"the replicas of the server at {serving_url} share every step, so each would wait for rollouts of all",
                hint="a mixture of experts can be lent without data parallelism",
            )
        return path
    if engines:
        numbers = ", ".join(str(header.replica) for _, header in engines)
        raise ConfigError(
            f"the server at {serving_url} has {len(engines)} engines, and the status of one says nothing of the "
            "devices of the others",
            hint=f"lend each by an agent of its own, with its devices and --serving-replica, one of: {numbers}",
        )
    raise ConfigError(
        f"the server at {serving_url} publishes no status segment, so it cannot be lent safely",
        hint="restart vLLM with --scheduler-cls rose.vllm.ServingScheduler (on a GPU: AsyncServingScheduler), SGLang "
        "with ROSE_SGLANG=serving, as the same user, on this machine and in the same container",
    )


def _listening(port: int) -> set[str]:
    """Return the listening sockets of a port as /proc/PID/fd names them."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    return sockets


def _holds(process_id: int, sockets: set[str]) -> bool:
    with suppress(OSError):
        for descriptor in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(OSError):
                if os.readlink(descriptor) in sockets:
                    return True
    return False


def _with_parents(process_id: int) -> list[int]:
    process_ids = []
    while process_id > 1:
        process_ids.append(process_id)
        try:
            process_id = int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return process_ids
