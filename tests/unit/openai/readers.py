"""The decoders of every route, and the least body of each."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rose.openai import chat, completions, generate, information, responses_api
from rose.openai.http_errors import Failure
from rose.openai.request_parsing import BodyReader

READERS: dict[str, BodyReader[Any]] = {
    "completions": completions.READER,
    "chat": chat.READER,
    "responses": responses_api.READER,
    "generate": generate.READER,
    "sampling": generate.SAMPLING_READER,
    "tokenize": information.TOKENIZE_READER,
}

LEAST: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "x"},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "responses": {"input": "x"},
    "generate": {"token_ids": [1]},
    "sampling": {},
    "tokenize": {},
}


def refused(name: str, **body: Any) -> Failure:
    with pytest.raises(Failure) as caught:
        READERS[name].read(msgspec.json.encode(LEAST[name] | body))
    assert caught.value.status == 400
    return caught.value
