"""Tool calls in the format of Hermes and Qwen: the model writes them into its text, clients want them beside it.

    Let me see. <tool_call>
    {"name": "look", "arguments": {"where": "north"}}
    </tool_call>

Text goes in as it comes and comes out as what may be shown, with the calls that were complete in it. A block is a call
only when its closing mark has come and what it holds is right: anything else stays text, letter by letter, so nothing
that was shown is ever taken back and nothing that the model said is lost. Blank space before a call, or after the last
one, belongs to the format and is not shown. How the text was cut into pieces changes nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from rose.front.failures import bad_request
from rose.front.replies import SaidCall, SaidCallDelta, SaidFunction
from rose.front.requests import CalledTool, ChatBody, Tool
from rose.front.structure import is_surely_small, too_large

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ID_BYTES = 12


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an answer, counted from 0. `arguments` is a JSON object."""

    number: int
    name: str
    arguments: dict[str, Any]

    @property
    def arguments_text(self) -> str:
        return json.dumps(self.arguments, ensure_ascii=False)


@dataclass(slots=True)
class Said:
    """What may be shown of an answer, or of a piece of it."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)

    def __add__(self, later: Said) -> Said:
        return Said(self.text + later.text, self.calls + later.calls)


class CallFinder:
    """Text in, text and calls out. One per answer."""

    def __init__(self) -> None:
        self._held = ""  # cannot be told yet: blank space, the beginning of a mark, or a block that is open
        self._calls = 0

    @property
    def has_called(self) -> bool:
        return self._calls > 0

    def push(self, text: str) -> Said:
        """What this text lets us show."""
        self._held += text
        said = Said()
        while self._step(said):
            pass
        return said

    def finish(self) -> Said:
        """The rest, when no more comes. A last block may lack its closing mark."""
        said = self.push("")
        lead, mark, block = self._held.partition(OPEN)
        if mark and self._took(block, said):
            pass
        elif lead.strip() or mark or not self.has_called:
            said.text += self._held
        self._held = ""
        return said

    def _step(self, said: Said) -> bool:
        """Settle the beginning of what is held; whether there may be more to settle."""
        lead, mark, rest = self._held.partition(OPEN)
        if not mark:
            shown = len(self._held) - _undecided(self._held)
            said.text, self._held = said.text + self._held[:shown], self._held[shown:]
            return False
        if shown := len(lead.rstrip()):
            said.text, self._held = said.text + lead[:shown], self._held[shown:]
            return True
        block, closed, after = rest.partition(CLOSE)
        if not closed:
            return False
        if self._took(block, said):
            self._held = after
        else:  # no call: its first mark is text, and what follows is looked at again
            said.text, self._held = said.text + lead + OPEN, rest
        return True

    def _took(self, block: str, said: Said) -> bool:
        """Whether the block was a call."""
        call = _call_of(block, self._calls)
        if call is None:
            return False
        said.calls.append(call)
        self._calls += 1
        return True


def said_in(text: str) -> Said:
    """What a whole answer says."""
    finder = CallFinder()
    return finder.push(text) + finder.finish()


def shown(call: Call, key: str) -> SaidCall:
    """Its id comes from the key of its answer, so that it is the same whenever the answer is read again."""
    name = hashlib.blake2b(f"{key}/{call.number}".encode(), digest_size=ID_BYTES).hexdigest()
    return SaidCall(f"call_{name}", SaidFunction(call.name, call.arguments_text))


def shown_in_stream(call: Call, key: str) -> SaidCallDelta:
    whole = shown(call, key)
    return SaidCallDelta(call.number, whole.id, whole.function)


def are_parsed(body: ChatBody, tool_parser: str) -> bool:
    """Whether calls are looked for in the answer; otherwise it is all text."""
    return bool(body.tools) and body.tool_choice != "none" and tool_parser == "hermes"


def check_tools(body: ChatBody) -> None:
    if body.tool_choice in (None, "none", "auto"):
        return
    message = '`tool_choice` may be "auto" or "none": what the model says is not forced into a form'
    raise bad_request(message, param="tool_choice", code="unsupported_parameter")


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """As chat templates get them: what models are trained to read, in the usual order."""
    if not tools:
        return None
    found = []
    for tool in tools:
        function = msgspec.to_builtins(tool.function)
        function.pop("strict", None)
        found.append({"type": tool.type, "function": function})
    return found


def plain_calls(calls: Sequence[CalledTool], where: str) -> list[dict[str, Any]]:
    """As chat templates get them: arguments as an object, not as text."""
    return [
        {"id": call.id, "type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
        for number, call in enumerate(calls)
        for arguments in [arguments_of(call, f"{where}.tool_calls[{number}]")]
    ]


def arguments_of(call: CalledTool, where: str) -> dict[str, Any]:
    text = call.function.arguments or "{}"
    data = text.encode(errors="replace")
    try:
        found = _loaded(text) if is_surely_small(data) or not too_large(data) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        param = f"{where}.function.arguments"
        raise bad_request(f"`{param}` must be a JSON object, as text", param=param)
    return found


def _undecided(text: str) -> int:
    """Length of the end that may belong to a call: blank space, and the beginning of a mark after it."""
    kept = next((size for size in range(min(len(text), len(OPEN) - 1), 0, -1) if text.endswith(OPEN[:size])), 0)
    before = text[: len(text) - kept]
    return kept + len(before) - len(before.rstrip())


def _call_of(block: str, number: int) -> Call | None:
    """The call that a block holds; None if it holds something else."""
    try:
        found = _loaded(block)
        json.dumps(found, ensure_ascii=False).encode()  # half a character cannot be sent to anybody
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments", {})
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return Call(number, name, arguments)


def _loaded(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
