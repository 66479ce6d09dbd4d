"""`rose demo`: a device on a small model, from nothing to streamed tokens, in one command.

It makes the model if it is not there yet, starts `rose serve` on a free port as a child, asks for one completion, shows
the tokens as they come, and stops the device, whatever happens in between; if the demo is killed, the kernel ends the
device too. It talks to the device as any client would, over HTTP, and needs nothing but the standard library for it.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rose.config.device import DeviceSettings
from rose.errors import Unavailable

SUMMARY = "start a device on a small random model and watch it answer"

PRESET = "qwen3-3m"
SEED = 0
PROMPT = "Once upon a time, on a device that was mostly idle,"
START_S_MAX = 180.0  # the first start compiles the kernels; later ones find them in the cache
STOP_S_MAX = 20.0
HOST = "127.0.0.1"


@dataclass(slots=True)
class Timing:
    """What one streamed answer took, seen by the client."""

    asked_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0

    def saw_token(self, now_s: float) -> None:
        self.first_s = now_s if self.first_s is None else self.first_s
        self.last_s = now_s

    @property
    def tokens_per_s(self) -> float | None:
        """Over the decode phase, so the first token does not count."""
        if self.first_s is None or self.last_s is None or self.last_s <= self.first_s:
            return None
        return (self.tokens - 1) / (self.last_s - self.first_s)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=DeviceSettings().device, help="cores to run on (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to ask for (default %(default)s)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the model and the log go (runs/)")


def run(arguments: argparse.Namespace) -> int:
    # Ctrl-C and a polite kill take the same way out, past every `finally`.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    model = _model(arguments.runs / "models" / PRESET)
    log = arguments.runs / "demo" / "serve.log"
    port = _free_port()
    print(f"Starting a device on {arguments.device} (the first start compiles its kernels) ...", flush=True)
    with _device(model, arguments.device, port, log) as seconds:
        print(f"Ready after {seconds:.1f} s. Asking it to go on from:\n\n  {PROMPT}\n")
        timing = _ask(port, arguments.tokens)
    _report(model, arguments.device, port, timing)
    return 0


def _model(folder: Path) -> Path:
    if not (folder / "config.json").exists():
        from rose.models.presets import write_preset

        print(f"Making a {PRESET} model with random weights in {folder} ...", flush=True)
        write_preset(PRESET, folder, SEED)
    return folder


@contextlib.contextmanager
def _device(model: Path, device: str, port: int, log: Path) -> Iterator[float]:
    """A running `rose serve`; yields the seconds it took to answer."""
    tied = [sys.executable, "-m", "rose.launch.child", str(os.getpid()), "0", ""]  # ends when this process ends
    command = [*tied, sys.executable, "-m", "rose", "serve", str(model), "--device", device, "--port", str(port)]
    log.parent.mkdir(parents=True, exist_ok=True)
    began_s, child = time.monotonic(), None
    try:
        with log.open("wb") as output, _signals_wait():
            # A session of its own: Ctrl-C reaches the demo only, which then stops the device in good order.
            child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        _wait_until_healthy(child, port, log)
        yield time.monotonic() - began_s
    finally:
        if child is not None:
            _stop(child)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Until the end of the block, so that no child is started and then not known to anybody."""
    asked: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


def _wait_until_healthy(child: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_S_MAX
    while time.monotonic() < deadline_s:
        if child.poll() is not None:
            raise Unavailable(f"the device stopped while starting:\n{_tail(log)}", hint="rose doctor")
        if _is_healthy(port):
            return
        time.sleep(0.1)
    raise Unavailable(f"the device did not answer within {START_S_MAX:.0f} s:\n{_tail(log)}", hint="rose doctor")


def _is_healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _ask(port: int, tokens: int) -> Timing:
    body = {
        "model": PRESET,
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 1.0,
        "seed": SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    try:
        timing = Timing(asked_s=time.monotonic())
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise Unavailable(f"the device answered {response.status}: {response.read(500).decode(errors='replace')}")
        _show(response, timing)
        return timing
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"the device broke off the answer: {error}", hint="see runs/demo/serve.log") from error
    finally:
        connection.close()


def _show(response: http.client.HTTPResponse, timing: Timing) -> None:
    print("  ", end="")
    column = 0
    for event in _events(response):
        for choice in event.get("choices") or ():
            timing.saw_token(time.monotonic())
            for character in choice.get("text") or "":
                print(character if character.isprintable() else "·", end="", flush=True)
                column += 1
                if column % 100 == 0:
                    print("\n  ", end="")
        timing.tokens = (event.get("usage") or {}).get("completion_tokens", timing.tokens)
    print("\n")


def _events(response: http.client.HTTPResponse) -> Iterator[dict]:
    """The JSON objects of a server-sent event stream, up to [DONE]."""
    for line in response:
        data = line.decode("utf-8").strip()
        if data == "data: [DONE]":
            return
        if data.startswith("data: "):
            yield json.loads(data.removeprefix("data: "))


def _report(model: Path, device: str, port: int, timing: Timing) -> None:
    first_ms = "-" if timing.first_s is None else f"{(timing.first_s - timing.asked_s) * 1000:.1f} ms"
    rate = "-" if timing.tokens_per_s is None else f"{timing.tokens_per_s:.0f} tokens/s"
    rows = {
        "model": f"{PRESET}, random weights, in {model}",
        "device": device,
        "KV memory": f"{DeviceSettings().engine.kv_memory_mb} MiB",
        "url": f"http://{HOST}:{port}/v1 (stopped now)",
        "first token": first_ms,
        "after that": rate,
        "tokens": str(timing.tokens),
    }
    print("That was noise, and it should be: the model has random weights and has learnt nothing yet.")
    print("What counts is that a whole device ran: HTTP, tokenizer, batching, paged KV memory, sampling.\n")
    for name, value in rows.items():
        print(f"  {name:<12} {value}")
    rose = os.path.relpath(Path(sys.prefix) / "bin" / "rose")
    print(f"\nNext, keep one running and talk to it with any OpenAI client:\n\n  {rose} serve {model} --port 8000")


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_S_MAX)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _tail(log: Path, characters: int = 2000) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-characters:].strip() or "(it said nothing)"
