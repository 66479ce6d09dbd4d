"""Secrets on this machine: files that only their user may read, and environments without secrets.

The file mode is set when the file is created, never afterwards, so no other user can open it in between. The content is
written to a temporary file, synced and renamed, so a reader sees the old or the new content, and a crash leaves one of
the two. Every process of the same user can read an environment in /proc, so a process passes on to its children only
the secrets that their role needs.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700


def make_private_folder(path: Path) -> None:
    """Create the folder, readable by its user only; missing parents get the usual mode. Raises OSError.

    An existing folder of this user is closed to others. A symbolic link or a folder of another user is refused.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        os.mkdir(path, FOLDER_MODE)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to another user (uid {status.st_uid})")
        if status.st_mode & 0o077:
            os.fchmod(handle, FOLDER_MODE)
    finally:
        os.close(handle)


def write_private(path: Path, content: bytes) -> None:
    """Replace the file's content, durably; only this user can read it. Raises OSError."""
    write_durable(path, content, FILE_MODE)


def write_durable(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Replace the file's content: after a crash there is the old or the new one, whole. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames and removals in this folder durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_SECRET = re.compile(r"(ROSE|RAY)_\w*(TOKENS?|SECRETS?|KEYS?|PASSWORD)(_FILE|_PATH)?")


def is_secret(variable: str) -> bool:
    """Return whether a variable of this name holds, or names the file of, a token, a secret or a key."""
    return _SECRET.fullmatch(variable) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    return {variable: value for variable, value in environment.items() if not is_secret(variable)}
