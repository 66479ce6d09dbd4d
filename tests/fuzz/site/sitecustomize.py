"""Starts a heartbeat in every Python process of a test that asks for one by its environment.

The fuzzers put this folder first on PYTHONPATH, so that the servers and all processes that they start are measured
as users start them.
"""

import os

if "ROSE_TEST_HEARTBEATS" in os.environ:
    from pathlib import Path

    from tests.fuzz.heartbeat import BLOCK_MS, BLOCK_VARIABLE, VARIABLE, install

    install(Path(os.environ[VARIABLE]), float(os.environ.get(BLOCK_VARIABLE, BLOCK_MS)))
