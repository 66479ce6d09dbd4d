"""Coverage-guided fuzzing of everything that decodes bytes from outside, with one property: only stated errors escape.

    python -m tests.fuzz.decoders SECONDS                              all targets, so long each
    python -m tests.fuzz.coverage_guided TARGET [libFuzzer options]    one target

An input is either the bytes themselves or a seed for a value of the decoder's own type (`values.Maker`), so that both
the format and what comes behind it are reached. Without atheris the same targets run on random inputs. libFuzzer stops
an input that takes longer than `INPUT_S` or more memory than `MEMORY_MB`: work is bounded too.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tests.fuzz.values import Format, Maker

from rose.api import worker_messages as worker_messages
from rose.api.frames import FrameReader
from rose.bounds import UNREADABLE
from rose.device import engine_messages
from rose.device.admin_routes import ADMIN_ROUTES
from rose.device.kv_pool import exchange, ledger
from rose.errors import RoseError
from rose.gateway import trainer_routes, turn_log
from rose.openai.application import ROUTES
from rose.openai.generate import SAMPLING_READER
from rose.openai.http_errors import Failure
from rose.weights import codec
from rose.weights.manifest import Claim, Manifest, RankManifest, check_manifest, seal, unseal
from rose.weights.relay import relay_api

ROOT = Path(__file__).parents[2]
INPUT_S, MEMORY_MB = 5, 2048
SECRET, KEY = b"a-secret-of-a-run-for-fuzzing", "r/versions/x"
GUARD = 0xABCD
RELAY_BODIES = (relay_api.Stored, relay_api.ListingPage, relay_api.RelayProblemBody)
READERS = [route.reader for route in (*ROUTES, *ADMIN_ROUTES) if route.reader is not None]
READERS += [SAMPLING_READER, trainer_routes.BEGIN, trainer_routes.FINISH, trainer_routes.PUBLISH]
POOL_RECORDS: tuple[tuple[bytes, int, Callable[[bytes], object]], ...] = (
    (exchange.MAGIC + struct.pack("=I", exchange.EXCHANGE_VERSION), exchange.WELCOME.size, exchange._read_welcome),
    (
        ledger.MAGIC + struct.pack("=I", ledger.LAYOUT_VERSION),
        ledger.HEADER.size,
        lambda data: ledger.LedgerHeader.unpack(data, Path("ledger")),
    ),
)

# Errors that escape today, by target, and where that is described. Delete an entry with its repair.
# UnicodeDecodeError: audit 28. RecursionError: found by this fuzzer.


@dataclass(frozen=True)
class Target:
    """`decode` may raise only `stated`. `kinds` are the types that values are made of."""

    decode: Callable[[bytes], object]
    stated: tuple[type[Exception], ...]
    kinds: tuple[Any, ...] = ()
    format: Format = "msgpack"


def _engine_frames(data: bytes) -> None:
    """Read a stream in pieces: each frame is a command or an event."""
    reader = FrameReader()
    for start in range(0, len(data), 7):
        for body in reader.push(data[start : start + 7]):
            _engine_message(body)
    _engine_message(data)


def _engine_message(body: bytes) -> None:
    failures = []
    for decode in (engine_messages.decode_command, engine_messages.decode_event):
        try:
            decode(body)
        except Exception as error:
            failures.append(error)
    if len(failures) == 2:
        raise next((error for error in failures if not isinstance(error, UNREADABLE)), failures[0])


def _relay_response(data: bytes) -> None:
    for kind in RELAY_BODIES:
        with contextlib.suppress(*UNREADABLE):
            body = relay_api.decode_body(data, kind)
            if isinstance(body, relay_api.RelayProblemBody):
                relay_api.error_of(body.error, KEY)


def _record(data: bytes) -> None:
    """Unseal what an insider sealed: any bytes at all."""
    sealed = seal(SECRET, KEY, msgspec.Raw(data))  # type: ignore[arg-type]
    for kind in (Claim, RankManifest):
        with contextlib.suppress(RoseError):
            unseal(SECRET, KEY, sealed, kind)
    check_manifest(unseal(SECRET, KEY, sealed, Manifest), run="r", expected=None)


def _stranger_record(data: bytes) -> None:
    unseal(SECRET, KEY, data, Manifest)


def _payload(data: bytes) -> None:
    """Decode a weight payload into elements between two guards."""
    elements = min(4096, int.from_bytes(data[8:10], "little"))
    for kind in ("<u2", "<u4"):
        memory = np.full(elements + 2048, GUARD, kind)
        try:
            codec.apply(data, memory[1024 : 1024 + elements])
        finally:
            assert (memory[:1024] == GUARD).all() and (memory[1024 + elements :] == GUARD).all(), "beyond its place"


class _Rows:
    """A ledger's file that holds one row of the log."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def fetch(self, query: str) -> Iterator[tuple[Any, ...]]:
        return iter([(1, self._data)])


def _ledger_row(data: bytes) -> None:
    framed = len(data).to_bytes(turn_log.LENGTH_BYTES, "little") + data
    for row in (data, framed):
        turn_log.read_log(_Rows(row))  # type: ignore[arg-type]


def _pool_record(data: bytes) -> None:
    """Read what a KV pool's files and socket say: any bytes, also behind the right first ones."""
    refused = None
    for magic, size, decode in POOL_RECORDS:
        for record in (data, (magic + data).ljust(size, b"\0")[:size]):
            try:
                decode(record)
            except RoseError as error:
                refused = error
    if refused is not None:
        raise refused


def _body(data: bytes) -> None:
    """Read a body with the reader of each route; the last refusal counts."""
    refusal: Failure | None = None
    for reader in READERS:
        try:
            reader.read(data)
        except Failure as failure:
            refusal = failure
    if refusal is not None:
        raise refusal


TARGETS: dict[str, Target] = {
    "worker-messages": Target(
        worker_messages.decode_to_gateway, (RoseError,), (list[worker_messages.ToGateway],)
    ),
    "gateway-messages": Target(worker_messages.decode_to_agent, (RoseError,), (list[worker_messages.ToAgent],)),
    "engine-messages": Target(
        _engine_frames, (RoseError, *UNREADABLE), (engine_messages.Command, engine_messages.Event)
    ),
    "relay-responses": Target(_relay_response, (), RELAY_BODIES, "json"),
    "manifests": Target(_record, (RoseError,), (Manifest, RankManifest, Claim)),
    "strange-records": Target(_stranger_record, (RoseError,), (Manifest,)),
    "codec": Target(_payload, (RoseError,)),
    "ledger-rows": Target(
        _ledger_row, (RoseError, *UNREADABLE), (turn_log.TurnBegan, turn_log.TokensLogged, turn_log.TurnDropped)
    ),
    "kv-pool-records": Target(_pool_record, (RoseError,)),
    "request-bodies": Target(
        _body, (Failure,), tuple(reader.kind for reader in READERS), "json"
    ),
}  # fmt: skip


def try_one(name: str, data: bytes) -> None:
    """Decode one input; raise what must not escape."""
    target = TARGETS[name]
    if target.kinds and data[:1] and data[0] & 1:
        chance = random.Random(data[1:])
        data = Maker(chance, target.format, bytes_max=1 << 12).body(chance.choice(target.kinds))
    elif name == "codec" and data[:1] and data[0] & 1:
        data = _damaged_payload(random.Random(data[1:]))
    else:
        data = data[1:]
    try:
        target.decode(data)
    except target.stated:
        return


def _damaged_payload(chance: random.Random) -> bytes:
    """Return a payload of a real update, with a few bytes changed."""
    draw = np.random.default_rng(chance.randrange(1 << 30))
    elements = chance.choice((1, 63, 700, 4000))
    base = draw.normal(size=elements).astype(np.float32)
    bits = (base.view(np.uint32) >> 16).astype(np.uint16)
    new = bits + (draw.random(elements) < chance.choice((0.01, 0.3, 1.0))).astype(np.uint16)
    known: dict[str, Any] = {"block_elements": chance.choice((64, 512)), "contexts": chance.random() < 0.5}
    payload = bytearray(codec.encode(bits, new, **known))
    for _ in range(chance.randrange(4)):
        payload[chance.randrange(len(payload))] = chance.randrange(256)
    return bytes(payload)


def run_all(seconds: float, seed: str) -> list[str]:
    """Run each target for so long; return the names of those that failed."""
    failed = []
    for name in TARGETS:
        has_atheris = importlib.util.find_spec("atheris") is not None
        problem = _with_atheris(name, seconds, seed) if has_atheris else _at_random(name, seconds, seed)
        print(
            f"decoder {name}: {problem or 'only stated errors'} ({'atheris' if has_atheris else 'at random'})",
            flush=True,
        )
        failed += [name] if problem else []
    return failed


def _at_random(name: str, seconds: float, seed: str) -> str:
    chance, until_s = random.Random(f"{seed}/{name}"), time.monotonic() + seconds
    while time.monotonic() < until_s:
        data = chance.randbytes(chance.randrange(1, 64))
        try:
            try_one(name, data)
        except Exception as error:
            return f"{type(error).__name__}: {error} for {data.hex()}"
    return ""


def _with_atheris(name: str, seconds: float, seed: str) -> str:
    with tempfile.TemporaryDirectory(prefix="rose-fuzz-") as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number in range(32):
            (corpus / str(number)).write_bytes(bytes([number & 1]) + random.Random(f"{seed}{number}").randbytes(24))
        number = random.Random(seed).randrange(1, 1 << 31)
        options = [f"-max_total_time={max(1, round(seconds))}", f"-seed={number}", f"-timeout={INPUT_S}"]
        options += [f"-rss_limit_mb={MEMORY_MB}", f"-artifact_prefix={folder}/", "-max_len=4096", str(corpus)]
        command = [sys.executable, "-m", "tests.fuzz.coverage_guided", name, *options]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode == 0:
            return ""
        inputs = [path.read_bytes().hex() for path in Path(folder).glob("*-*") if path.is_file()]
        return f"exit {ended.returncode}, input {inputs}\n{ended.stdout[-1500:]}\n{ended.stderr[-300:]}"


if __name__ == "__main__":
    sys.exit(int(bool(run_all(float(sys.argv[1]), "1"))))
