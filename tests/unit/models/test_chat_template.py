"""Chat templates render as in transformers, and a failing one refuses its request only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.models.made_tokenizers import CHAT, wrap, write_tokenizer

from rose.errors import ModelError, RequestRefused
from rose.models.chat_template import ChatTemplate
from rose.models.presets import CHATML, byte_vocabulary
from rose.models.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "move", "parameters": {"b": "<é>", "a": [1, None, True]}}}]


TEMPLATES = {
    "chatml": CHATML,
    "whitespace": "{% for m in messages %}\n    {% if true %}\n  {{ m.role }}: {{ m.content | trim }}\n"
    "    {% endif %}\n{% endfor %}\n",
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{{ t | tojson(indent=2) }}{% endfor %}{% endif %}"
    "{{ bos_token }}{{ eos_token }}{{ messages | length }}",
    "namespace and break": "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages[0]['content'].split(' ')[-1] }}",
    "generation": "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}\n{% endfor %}",
    "variables": "{{ enable_thinking }} {{ undefined_one }} {{ add_generation_prompt }} {{ documents is none }}",
}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str, tools: Any, prompt: bool) -> None:
    transformers = pytest.importorskip("transformers")
    special = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    write_tokenizer(tmp_path, {"chat_template": TEMPLATES[name], **special})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path).apply_chat_template(
        CHAT, tools=tools, add_generation_prompt=prompt, tokenize=False, enable_thinking=False
    )
    ours = Tokenizer.load(tmp_path).render_chat(CHAT, prompt, tools, {"enable_thinking": False})
    assert ours == theirs


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": named}))
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=TOOLS) == "with tools"


def test_a_template_file_wins(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, {"chat_template": "old"})
    (tmp_path / "chat_template.jinja").write_text("new")
    assert Tokenizer.load(tmp_path).render_chat(CHAT) == "new"
    (tmp_path / "chat_template.jinja").write_text("{{")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: chat template 'default' does not parse"):
        Tokenizer.load(tmp_path)


def test_content_in_parts() -> None:
    tokenizer = wrap(byte_vocabulary().tokenizer)
    tokenizer.chat = ChatTemplate({"default": CHATML}, "", {})
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "user\nab<|im_end|>" in tokenizer.render_chat([{"role": "user", "content": parts}])
    assert "user\n<|im_end|>" in tokenizer.render_chat([{"role": "user", "content": None}])


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ messages.append(1) }}", "not safely callable|access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10000000) %}x{% endfor %}", "[Rr]ange too big"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
    ],
)
def test_a_failing_template_refuses_the_request(tmp_path: Path, template: str, reason: str) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": template}))
    with pytest.raises(RequestRefused, match=f"the chat template refuses these messages: .*({reason})"):
        tokenizer.render_chat(CHAT)


def test_the_reason_is_bounded(tmp_path: Path) -> None:
    template = "{{ raise_exception(messages[0].content) }}"
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": template}))
    with pytest.raises(RequestRefused) as refused:
        tokenizer.render_chat([{"role": "user", "content": "long " * 10_000}])
    assert len(str(refused.value)) < 400


def test_a_template_can_tell_the_date(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, {"chat_template": "{{ strftime_now('%Y') }}"}))
    assert tokenizer.render_chat(CHAT).isdigit()
