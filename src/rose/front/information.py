"""The routes that generate nothing: models, health, metrics, version, tokens of a text and back."""

from __future__ import annotations

from aiohttp import web

from rose import __version__
from rose.errors import ContextTooLong
from rose.front.answering import json_response
from rose.front.bodies import BodyReader
from rose.front.context import Front
from rose.front.failures import bad_request, failure_of
from rose.front.logprobs import token_text
from rose.front.neutral import NEUTRAL_TOKENIZE
from rose.front.offload import offload
from rose.front.replies import Detokenized, Health, Model, ModelList, Tokenized, Version
from rose.front.requests import DetokenizeBody, TokenizeBody
from rose.observe.metrics import CONTENT_TYPE

TOKENIZE_READER = BodyReader(TokenizeBody, NEUTRAL_TOKENIZE)
DETOKENIZE_READER = BodyReader(DetokenizeBody)
INLINE_TOKENS = 4096  # decoded in a millisecond or two; more is done in a thread


async def models(front: Front, request: web.Request) -> web.Response:
    return json_response(ModelList(data=[_model(front)]))


async def model(front: Front, request: web.Request) -> web.Response:
    front.check_model(request.match_info["model"])
    return json_response(_model(front))


async def health(front: Front, request: web.Request) -> web.Response:
    if front.engine.trouble is not None:
        raise failure_of(front.engine.trouble)
    return json_response(Health())


async def metrics(front: Front, request: web.Request) -> web.Response:
    if front.desk is not None:
        await front.desk.refresh()
    return web.Response(body=front.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def version(front: Front, request: web.Request) -> web.Response:
    return json_response(Version(__version__))


async def tokenize(front: Front, request: web.Request) -> web.Response:
    body = TOKENIZE_READER.read(await front.read(request))
    front.check_model(body.model)
    tokens = await front.encode(*await _text_of(front, body))
    return json_response(
        Tokenized(
            tokens=tokens,
            count=len(tokens),
            max_model_len=front.engine.facts.max_context_tokens,
            token_strs=await _texts_of(front, tokens) if body.return_token_strs else None,
        )
    )


async def detokenize(front: Front, request: web.Request) -> web.Response:
    body = DETOKENIZE_READER.read(await front.read(request))
    front.check_model(body.model)
    if len(body.tokens) > front.context_tokens:
        raise ContextTooLong(f"`tokens` has {len(body.tokens)}, more than the context of {front.context_tokens}")
    if body.tokens and max(body.tokens) >= front.vocabulary:
        message = f"`tokens` has {max(body.tokens)}; the vocabulary has {front.vocabulary}, counted from 0"
        raise bad_request(message, param="tokens")
    return json_response(Detokenized(await _text_of_tokens(front, body.tokens)))


async def _text_of_tokens(front: Front, tokens: list[int]) -> str:
    if len(tokens) <= INLINE_TOKENS:
        return front.tokenizer.decode(tokens, skip_special_tokens=False)
    [text] = await offload(front.tokenizer.decode_many, [tokens])
    return text


async def _texts_of(front: Front, tokens: list[int]) -> list[str]:
    def texts() -> list[str]:
        return [token_text(front.tokenizer, token) for token in tokens]

    return texts() if len(tokens) <= INLINE_TOKENS else await offload(texts)


async def _text_of(front: Front, body: TokenizeBody) -> tuple[str, bool]:
    """The text to tokenise, and whether special tokens are added: a rendered chat has them already."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either `prompt` or `messages`", param="prompt")
    if body.messages is not None:
        return await front.render_apart(body), bool(body.add_special_tokens)
    assert body.prompt is not None
    return body.prompt, body.add_special_tokens is not False


def _model(front: Front) -> Model:
    return Model(
        id=front.model_name,
        created=front.created,
        root=front.model_name,
        max_model_len=front.engine.facts.max_context_tokens,
    )
