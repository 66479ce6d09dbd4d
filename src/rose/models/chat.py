"""Chat templates: a conversation becomes the text of a prompt.

Templates are programs that come with a model, so they run in jinja2's sandbox, with the settings and the
few helpers that transformers gives them: a template renders here as it does there. A template that does not
parse is refused at start-up; one that fails on a conversation refuses that request and no other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rose.errors import ModelError, RequestRefused
from rose.models.files import Keys, read_text

TEMPLATE_FILE = "chat_template.jinja"
REASON_CHARACTERS_MAX = 300
"""A template may put a whole conversation into its complaint; the reply to the caller stays short."""


class Generation(Extension):
    """`{% generation %}` marks what the assistant says for training; to a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """The compiled templates of one model: `default`, and others by name."""

    def __init__(self, sources: Mapping[str, str], file: str, special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        self._special_tokens = special_tokens
        self._templates = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                message = f"{file}: chat template {name!r} does not parse: {error.message} at line {error.lineno}"
                raise ModelError(message) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Raises RequestRefused with the template's reason."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        values = {**self._special_tokens, **(variables or {})}
        values |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._templates[name].render({"documents": None, **values})
        # Whatever a foreign program raises on a foreign conversation is a reason to refuse, not to stop.
        except Exception as error:
            raise RequestRefused(f"the chat template refuses these messages: {_reason(error)}") from error


def read_chat_template(folder: Path, config: Keys, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """From chat_template.jinja, else from tokenizer_config.json; None if neither has one."""
    path = folder / TEMPLATE_FILE
    if path.exists():
        return ChatTemplate({"default": read_text(path)}, str(path), special_tokens)
    if "chat_template" not in config:
        return None
    return ChatTemplate(_named_sources(config), config.file, special_tokens)


def _named_sources(config: Keys) -> dict[str, str]:
    value = config.values["chat_template"]
    if isinstance(value, str):
        return {"default": value}
    try:
        sources = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError) as error:
        raise config.complaint("chat_template", "must be a string or a list of {name, template}") from error
    if "default" not in sources or not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise config.complaint("chat_template", "must have a template named 'default'")
    return sources


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _format_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a prompt, not for a web page: jinja2's own filter escapes `<` and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _format_now(format: str) -> str:
    return datetime.now().strftime(format)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON_CHARACTERS_MAX else f"{text[:REASON_CHARACTERS_MAX]}..."
