"""The service registry: one private file per running service of this user, by which other commands find it.

An entry holds addresses and tokens, so its file has mode 0600 in a folder of mode 0700. The entry of a service that was
killed stays behind; the next service that registers removes it. A process id has a meaning only in its PID namespace,
and containers may share the folder, so the file's name has both, and only entries of the own namespace are read or
removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from rose.private_files import make_private_folder, write_private

NAME = re.compile(r"(\d+)-(\d+)\.json")  # PID namespace, process id
ENTRY_BYTES_MAX = 64 << 10
Entry = TypeVar("Entry")


@contextmanager
def registered(folder: Path, entry: msgspec.Struct) -> Iterator[Path]:
    """Keep the entry in the folder while this process runs the block. A folder that cannot be written is no error."""
    path = folder / f"{_namespace()}-{os.getpid()}.json"
    with suppress(OSError):
        make_private_folder(folder)
        sweep(folder)
        write_private(path, msgspec.json.encode(entry))
    try:
        yield path
    finally:
        with suppress(OSError):
            path.unlink()


def sweep(folder: Path) -> None:
    """Remove the entries of processes that have ended. Raises OSError."""
    for path, process_id in _own(folder):
        if not _is_running(process_id):
            path.unlink(missing_ok=True)


def entries(folder: Path, kind: type[Entry]) -> Iterator[Entry]:
    """Yield the entry of every running service, ordered by file name; skip files that hold something else."""
    for path, process_id in _own(folder):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            with path.open("rb") as file:
                content = file.read(ENTRY_BYTES_MAX)
            entry = msgspec.json.decode(content, type=kind)
            if _is_running(process_id):
                yield entry


def _own(folder: Path) -> list[tuple[Path, int]]:
    """Return the files of this PID namespace, each with its process id."""
    found = [(path, NAME.fullmatch(path.name)) for path in sorted(folder.glob("*.json"))]
    return [(path, int(match[2])) for path, match in found if match is not None and match[1] == _namespace()]


def _is_running(process_id: int) -> bool:
    return Path(f"/proc/{process_id}").exists()


def _namespace() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid").strip("pid:[]")
    return "0"
