"""Tool calls in the format of Hermes and Qwen: the model writes them into its text, clients want them beside it.

    Let me see. <tool_call>{"name": "look", "arguments": {"where": "north"}}</tool_call>

A block is a call only when its closing mark has come and its content is right. Anything else stays text, letter by
letter, so shown text is never taken back and no output is lost. Blank space before a call, or after the last one,
belongs to the format and is not shown. The result does not depend on how the text was split into pieces.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from rose.openai.http_errors import bad_request
from rose.openai.request_parsing import is_surely_small, too_large
from rose.openai.request_schemas import CalledTool, ChatBody, Tool
from rose.openai.response_schemas import FunctionCall, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call of an answer, counted from 0. `arguments` is a JSON object."""

    number: int
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class ParsedText:
    """The showable text and the calls of an answer, or of a piece of it."""

    text: str = ""
    calls: list[ParsedCall] = field(default_factory=list)

    def __add__(self, later: ParsedText) -> ParsedText:
        return ParsedText(self.text + later.text, self.calls + later.calls)


class CallFinder:
    """The parser of one answer."""

    def __init__(self) -> None:
        self._held = ""  # undecided yet: blank space, the beginning of a mark, or a block that is open
        self._calls = 0

    @property
    def has_called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> ParsedText:
        """Return what this text makes showable."""
        self._held += text
        parsed = ParsedText()
        while self._step(parsed):
            pass
        return parsed

    def finish(self) -> ParsedText:
        """Return the rest, when no more comes. A last block may lack its closing mark."""
        parsed = self.push("")
        lead, mark, block = self._held.partition(OPEN)
        is_call = bool(mark) and self._add_call(block, parsed)
        if not is_call and (lead.strip() or mark or not self.has_called):
            parsed.text += self._held
        self._held = ""
        return parsed

    def _step(self, parsed: ParsedText) -> bool:
        """Settle the beginning of the held text; return whether there may be more to settle."""
        lead, mark, rest = self._held.partition(OPEN)
        if not mark:
            showable = len(self._held) - _undecided(self._held)
            parsed.text, self._held = parsed.text + self._held[:showable], self._held[showable:]
            return False
        if showable := len(lead.rstrip()):
            parsed.text, self._held = parsed.text + lead[:showable], self._held[showable:]
            return True
        block, closed, after = rest.partition(CLOSE)
        if not closed:
            return False
        if self._add_call(block, parsed):
            self._held = after
        else:  # no call: its first mark is text, and what follows is looked at again
            parsed.text, self._held = parsed.text + lead + OPEN, rest
        return True

    def _add_call(self, block: str, parsed: ParsedText) -> bool:
        """Add the call that the block holds; return whether it holds one."""
        try:
            content = _load(block)
            json.dumps(content, ensure_ascii=False).encode()  # half a character cannot be sent to a client
        except (ValueError, RecursionError):
            return False
        if not isinstance(content, dict):
            return False
        name, arguments = content.get("name"), content.get("arguments", {})
        if not isinstance(name, str) or not name or not isinstance(arguments, dict):
            return False
        parsed.calls.append(ParsedCall(self._calls, name, arguments))
        self._calls += 1
        return True


def parse_text(text: str) -> ParsedText:
    """Return the text and the calls of a whole answer."""
    finder = CallFinder()
    return finder.push(text) + finder.finish()


def tool_call_of(call: ParsedCall, key: str) -> ToolCall:
    """Return a call for a client. Its id comes from the key of its answer, so a repeated answer has the same."""
    digest = hashlib.blake2b(f"{key}/{call.number}".encode(), digest_size=ID_BYTES).hexdigest()
    return ToolCall(f"call_{digest}", FunctionCall(call.name, json.dumps(call.arguments, ensure_ascii=False)))


def are_parsed(body: ChatBody, tool_parser: str) -> bool:
    """Return whether calls are looked for in the answer; otherwise it is all text."""
    return bool(body.tools) and body.tool_choice != "none" and tool_parser == "hermes"


def check_tools(body: ChatBody) -> None:
    if body.tool_choice not in (None, "none", "auto"):
        message = '`tool_choice` may be "auto" or "none": the output of the model is not forced into a form'
        raise bad_request(message, param="tool_choice", code="unsupported_parameter")


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """Return tools as chat templates get them: what models are trained to read, in the usual order."""
    plain = []
    for tool in tools or ():
        function = msgspec.to_builtins(tool.function)
        function.pop("strict", None)
        plain.append({"type": tool.type, "function": function})
    return plain or None


def plain_calls(calls: Sequence[CalledTool], where: str) -> list[dict[str, Any]]:
    """Return calls as chat templates get them: arguments as an object, not as text."""
    plain = []
    for number, call in enumerate(calls):
        arguments = arguments_of(call, f"{where}.tool_calls[{number}]")
        function = {"name": call.function.name, "arguments": arguments}
        plain.append({"id": call.id, "type": call.type, "function": function})
    return plain


def arguments_of(call: CalledTool, where: str) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    data = text.encode(errors="replace")
    try:
        arguments = _load(text) if is_surely_small(data) or not too_large(data) else None
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        param = f"{where}.function.arguments"
        raise bad_request(f"`{param}` must be a JSON object, as text", param=param)
    return arguments


def _undecided(text: str) -> int:
    """Return the length of the end that may belong to a call: blank space, and the beginning of a mark after it."""
    kept = next((size for size in range(min(len(text), len(OPEN) - 1), 0, -1) if text.endswith(OPEN[:size])), 0)
    before = text[: len(text) - kept]
    return kept + len(before) - len(before.rstrip())


def _load(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
