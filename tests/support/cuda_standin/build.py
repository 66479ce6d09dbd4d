"""Compiles the stand-in for the CUDA driver, for tests and benchmarks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("standin.c")
COMPILER = shutil.which("gcc")
COUNTED = ("handles", "mappings", "reservations", "streams", "contexts", "created_bytes")


def build_standin(folder: Path) -> Path:
    """Return the library, compiled into this folder. Needs `COMPILER`."""
    assert COMPILER, "there is no gcc"
    library = folder / "libcuda-standin.so"
    flags = ["-std=gnu11", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([COMPILER, *flags, "-o", str(library), str(SOURCE)], check=True, timeout=120)
    return library


class StandIn:
    """The stand-in as this process has loaded it."""

    def __init__(self, library: Path) -> None:
        self.path = library
        self.library = ctypes.CDLL(str(library))

    def counts(self) -> dict[str, int]:
        """Return what this process has of the device."""
        numbers = (ctypes.c_size_t * len(COUNTED))()
        self.library.standin_counts(numbers)
        return dict(zip(COUNTED, numbers, strict=True))

    def fail(self, wishes: str = "") -> None:
        """Make calls fail from now on: "NAME:n:code,..."; an empty text ends it."""
        self.library.standin_fail(wishes.encode())

    def reset(self) -> None:
        """Let go of everything that this process has of the device, and make no more calls fail."""
        self.library.standin_reset()
