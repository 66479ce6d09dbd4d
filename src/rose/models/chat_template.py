"""Chat templates: the text of a prompt from a conversation.

Templates are programs that come with a model, so they run in jinja2's sandbox, with the settings and helpers that
transformers gives them. A template that does not parse is refused at start-up; one that fails on a conversation
refuses that request only.
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
REASON_CHARACTERS_MAX = 300  # a template may put a whole conversation into its error


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training and changes no prompt."""

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
        """Return the prompt of a conversation. Raises RequestRefused with the template's reason."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        values = {**self._special_tokens, **(variables or {})}
        values |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._templates[name].render({"documents": None, **values})
        except Exception as error:  # a template may raise anything
            reason = " ".join(str(error).split()) or type(error).__name__
            if len(reason) > REASON_CHARACTERS_MAX:
                reason = f"{reason[:REASON_CHARACTERS_MAX]}..."
            raise RequestRefused(f"the chat template refuses these messages: {reason}") from error


def read_chat_template(folder: Path, config: Keys, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Return the template of chat_template.jinja, else of tokenizer_config.json; None if neither has one."""
    path = folder / TEMPLATE_FILE
    if path.exists():
        return ChatTemplate({"default": read_text(path)}, str(path), special_tokens)
    if "chat_template" not in config:
        return None
    value = config.values["chat_template"]
    try:
        sources = {"default": value} if isinstance(value, str) else {each["name"]: each["template"] for each in value}
    except (TypeError, KeyError) as error:
        raise config.complaint("chat_template", "must be a string or a list of {name, template}") from error
    if "default" not in sources or not all(isinstance(text, str) for pair in sources.items() for text in pair):
        raise config.complaint("chat_template", "must have a template named 'default'")
    return ChatTemplate(sources, config.file, special_tokens)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON for a prompt, not for a web page: jinja2's own filter escapes `<` and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message))
