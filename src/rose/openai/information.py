"""The routes that generate nothing: models, health, metrics, version, tokens of a text and back."""

from __future__ import annotations

from aiohttp import web

from rose import __version__
from rose.errors import ContextTooLong
from rose.observe.metrics import CONTENT_TYPE
from rose.openai.http_context import HttpContext
from rose.openai.http_errors import bad_request, failure_of
from rose.openai.loops import offload
from rose.openai.request_parsing import BodyReader
from rose.openai.request_schemas import IGNORED_TOKENIZE, DetokenizeBody, TokenizeBody
from rose.openai.response_rendering import token_text
from rose.openai.response_schemas import Detokenized, Health, Model, ModelList, Tokenized, Version
from rose.openai.response_writing import json_response

TOKENIZE_READER = BodyReader(TokenizeBody, IGNORED_TOKENIZE)
DETOKENIZE_READER = BodyReader(DetokenizeBody)
INLINE_TOKENS = 4096  # decoded in a millisecond or two; more is done in a thread


async def models(context: HttpContext, request: web.Request) -> web.Response:
    return json_response(ModelList(data=[_model(context)]))


async def model(context: HttpContext, request: web.Request) -> web.Response:
    context.check_model(request.match_info["model"])
    return json_response(_model(context))


async def health(context: HttpContext, request: web.Request) -> web.Response:
    if context.engine.trouble is not None:
        raise failure_of(context.engine.trouble)
    return json_response(Health())


async def metrics(context: HttpContext, request: web.Request) -> web.Response:
    await context.refresh()
    return web.Response(body=context.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})


async def version(context: HttpContext, request: web.Request) -> web.Response:
    return json_response(Version(__version__))


async def tokenize(context: HttpContext, request: web.Request) -> web.Response:
    body = TOKENIZE_READER.read(await context.read(request))
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("send either `prompt` or `messages`", param="prompt")
    if body.prompt is None:  # a rendered conversation has its special tokens already
        tokens = await context.encode(await context.render(body), bool(body.add_special_tokens))
    else:
        tokens = await context.encode(body.prompt, body.add_special_tokens is not False)

    def texts() -> list[str]:
        return [token_text(context.tokenizer, token) for token in tokens]

    token_strs = None
    if body.return_token_strs:
        token_strs = texts() if len(tokens) <= INLINE_TOKENS else await offload(texts)
    return json_response(Tokenized(tokens, len(tokens), context.context_tokens, token_strs))


async def detokenize(context: HttpContext, request: web.Request) -> web.Response:
    body = DETOKENIZE_READER.read(await context.read(request))
    context.check_model(body.model)
    if len(body.tokens) > context.context_tokens:
        raise ContextTooLong(f"`tokens` has {len(body.tokens)}, more than the context of {context.context_tokens}")
    context.check_token_ids(body.tokens, "tokens")
    if len(body.tokens) <= INLINE_TOKENS:
        return json_response(Detokenized(context.tokenizer.decode(body.tokens, skip_special_tokens=False)))
    [text] = await offload(context.tokenizer.decode_many, [body.tokens])
    return json_response(Detokenized(text))


def _model(context: HttpContext) -> Model:
    return Model(
        id=context.model_name,
        created=context.created,
        root=context.model_name,
        max_model_len=context.context_tokens,
    )
