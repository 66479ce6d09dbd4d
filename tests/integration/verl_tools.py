"""A tool for verl's agent loops, and a parser that finds a call of it in any answer. verl's workers load this file."""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.function_tool import function_tool


@ToolParser.register("always")
class AlwaysCalls(ToolParser):
    """A model with random weights calls no tools, so every answer counts as a call."""

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[FunctionCall]]:
        return "called", [FunctionCall(name="count", arguments=f'{{"tokens": {len(responses_ids)}}}')]


@function_tool
def count(tokens: int) -> str:
    """Say how many tokens there were.

    Args:
        tokens: the number of tokens
    """
    return f"{tokens} tokens"
