"""What Codex 0.169.0 (`codex exec`, `wire_api = "responses"`) sends: recorded, with short texts and parameters."""

from __future__ import annotations

from typing import Any

_EXEC = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}},
    "required": ["cmd"],
    "additionalProperties": False,
}
_AGENTS = [{"type": "function", "name": "spawn_agent", "description": "x", "strict": False, "parameters": {}}]
CODEX_TOOLS: list[Any] = [
    {"type": "function", "name": "exec_command", "description": "Runs it.", "strict": False, "parameters": _EXEC},
    {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": _AGENTS},
    {"type": "web_search", "external_web_access": False},
]


def said(role: str, words: str, number: int) -> dict[str, Any]:
    content = [{"type": "input_text", "text": words}]
    return {"type": "message", "id": f"msg_{number}", "role": role, "content": content}


CODEX_INPUT: list[Any] = [
    said("developer", "You are a coding agent.", 1),
    said("developer", "<skills_instructions>x</skills_instructions>", 2),
    said("user", "<environment_context>x</environment_context>", 3),
    said("user", "Say hello", 4),
]


def codex_request(model: str, items: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "stream": True,
        "input": items,
        "tools": CODEX_TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a1f60c-4333-7e12-8d98-5892543a2a31",
        "client_metadata": {"session_id": "01a1f60c", "turn_id": "01a1f60d", "x-codex-window-id": "01a1f60c:0"},
    } | more
