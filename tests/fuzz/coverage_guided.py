"""Runs one target of `decoders` under atheris: `python -m tests.fuzz.coverage_guided TARGET [libFuzzer options]`.

The decoders are imported under instrumentation, so that inputs which reach new lines are kept. Compiled kernels are
left out: the compiler does not take instrumented code.
"""

from __future__ import annotations

import sys

import atheris

INSTRUMENTED = [
    "rose.bounds", "rose.device.engine_messages", "rose.api", "rose.openai", "rose.gateway", "rose.weights.manifest",
    "rose.weights.relay", "rose.weights.shards", "rose.weights.codec.deltas", "rose.weights.codec.format",
]  # fmt: skip

with atheris.instrument_imports(include=INSTRUMENTED):
    from tests.fuzz import decoders


def main(name: str, *options: str) -> None:
    atheris.Setup([sys.argv[0], *options], lambda data: decoders.try_one(name, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
