"""One step of a case: bytes that a client sends over one connection, how it sends them, and what it gets back.

A step is kept as bytes, not as a request, so that malformed HTTP is as natural as any other. Rows of the corpus are
steps as JSON: text is Latin-1, so that each byte is one character, and runs of the same text are folded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

HOST = "127.0.0.1"
ANSWER_BYTES_MAX = 64 << 20
PATIENCE_S = 30.0  # an answer that takes longer is a hang: no request of a fuzzer asks for so much work
HOLD_S = 0.4  # how long a client that does not read stays
PIECES = 5
Delivery = Literal["whole", "pieces", "partial", "leave", "deaf", "pipeline"]
_RUN = re.compile(r"(.{1,160}?)\1{15,}", re.DOTALL)


@dataclass(frozen=True)
class Step:
    """`head` is the request line and the headers with the blank line after them; Content-Length is part of it."""

    head: bytes
    body: bytes = b""
    delivery: Delivery = "whole"

    @property
    def has_answer(self) -> bool:
        """Whether the client waits for the whole answer."""
        return self.delivery in ("whole", "pieces", "pipeline")

    @property
    def name(self) -> str:
        return self.head.partition(b"\r\n")[0][:120].decode("latin-1")

    def to_json(self) -> dict[str, Any]:
        return {"head": folded(self.head), "body": folded(self.body), "delivery": self.delivery}

    @staticmethod
    def from_json(row: dict[str, Any]) -> Step:
        return Step(unfolded(row["head"]), unfolded(row["body"]), row["delivery"])


@dataclass(frozen=True)
class Reply:
    status: int  # 0 if the connection ended without an answer
    headers: dict[str, str]
    body: bytes
    is_late: bool = False

    def problem(self) -> str | None:
        """Say what is wrong with this answer, if anything is. A stated 503 is an answer as good as any."""
        if self.is_late:
            return f"no answer within {PATIENCE_S:g} s"
        if self.status < 500:
            return None
        if self.status == 503 and "retry-after" in self.headers and self._has_error():
            return None
        return f"status {self.status}"

    def _has_error(self) -> bool:
        try:
            return bool(json.loads(self.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return False


NONE = Reply(0, {}, b"")


def request(
    method: str, target: str, headers: list[tuple[str, str]], body: bytes = b"", delivery: Delivery = "whole"
) -> Step:
    """Return a well-formed request as a step; texts are Latin-1."""
    lines = [f"{method} {target} HTTP/1.1", "Host: localhost", *(f"{name}: {value}" for name, value in headers)]
    if method == "POST":
        lines.append(f"Content-Length: {len(body)}")
    return Step("\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n", body, delivery)


def folded(data: bytes) -> list[Any]:
    """Return texts, and [text, count] for runs."""
    text, found, at = data.decode("latin-1"), [], 0
    for match in _RUN.finditer(text) if len(text) > 256 else ():
        if match.start() > at:
            found.append(text[at : match.start()])
        found.append([match[1], len(match[0]) // len(match[1])])
        at = match.start() + len(match[1]) * found[-1][1]
    return [*found, text[at:]] if at < len(text) else found


def unfolded(parts: list[Any]) -> bytes:
    return "".join(part if isinstance(part, str) else part[0] * part[1] for part in parts).encode("latin-1")


async def play(step: Step, port: int) -> Reply:
    """Send the step over a connection of its own; return the last answer."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection(HOST, port, limit=1 << 20)
    except OSError:
        return NONE
    except TimeoutError:
        return Reply(0, {}, b"", is_late=True)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await _converse(step, reader, writer)
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        return NONE
    except TimeoutError:
        return Reply(0, {}, b"", is_late=step.has_answer)
    finally:
        writer.transport.abort()


async def _converse(step: Step, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply:
    whole = step.head + step.body
    match step.delivery:
        case "partial":
            writer.write(whole[: max(1, len(whole) * 2 // 3)])
            await asyncio.sleep(0.02)
            return NONE
        case "deaf":
            writer.write(whole)
            await asyncio.sleep(HOLD_S)
            return NONE
        case "leave":
            writer.write(whole)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await reader.read(64)
            return NONE
        case "pipeline":
            writer.write(whole * PIECES)
            reply = NONE
            for _ in range(PIECES):
                reply = await _answer(reader, step)
                if reply.problem() is not None or reply.headers.get("connection") == "close":
                    return reply
            return reply
        case "pieces":
            for start in range(0, len(whole), max(1, len(whole) // PIECES)):
                writer.write(whole[start : start + max(1, len(whole) // PIECES)])
                await writer.drain()
                await asyncio.sleep(0.005)
            return await _answer(reader, step)
    writer.write(whole)
    sending = asyncio.ensure_future(writer.drain())
    try:
        return await _answer(reader, step)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def _answer(reader: asyncio.StreamReader, step: Step) -> Reply:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split(" ", 2)[1])
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines if line)}
        if status != 100:
            break
    if step.head.startswith(b"HEAD "):
        return Reply(status, headers, b"")
    if headers.get("transfer-encoding") == "chunked":
        return Reply(status, headers, await _chunks(reader))
    if "content-length" in headers:
        return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))
    return Reply(status, headers, b"" if status in (204, 304, 101) else await reader.read(ANSWER_BYTES_MAX))


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while size := int((await reader.readline()).split(b";")[0], 16):
        found += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readline()
    return bytes(found)
