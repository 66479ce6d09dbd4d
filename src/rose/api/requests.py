"""What engines are asked for and what they report: requests, sampling, token events, facts.

These values cross every seam: HTTP handlers make requests, engines of any kind run them, sockets and the gateway carry
them. They live here so that a module can speak them without importing an engine. They are structs, since every turn
makes, sends and reads some.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from rose.bounds import (
    Count,
    Finite,
    Label,
    LogProbabilities,
    NonNegative,
    Priority,
    Serial,
    Share,
    Text,
    TokenId,
    TokenIds,
    VersionName,
)

SESSION_HEADER = "X-Session-ID"  # names the trajectory that a turn belongs to
SPANS_MAX = 4096  # versions that one answer can go through
PROMPT_LOGPROBS_MAX = 1 << 16  # entries of one response: about 30 ms of decoding in each process on the way
STOP_TOKEN_IDS_MAX = 4096  # a request names a few; some clients send all control tokens of a vocabulary

PromptLogprob = tuple[float, int, tuple[tuple[int, float], ...]]
"""A token of a prompt: its log-probability under the plain distribution, its rank from 1 on, and the best tokens."""

FinishReason = Literal["stop", "length", "abort"]


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens [start, end), which were sampled under this version of the weights."""

    version: VersionName
    start: Count
    end: Count


class Sampling(msgspec.Struct, frozen=True):
    """Sampling parameters of one request. `temperature` 0 is greedy; `top_k` 0 means off."""

    temperature: NonNegative = 1.0
    top_p: Share = 1.0
    top_k: Count = 0
    min_p: Share = 0.0
    repetition_penalty: NonNegative = 1.0
    max_tokens: Count = 16  # of the whole output, including what an earlier engine produced
    min_tokens: Count = 0
    ignore_eos: bool = False
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=STOP_TOKEN_IDS_MAX)] = ()
    seed: Serial = 0
    top_logprobs: Count = 0  # alternatives reported beside the sampled token
    prompt_logprobs: Count | None = None  # the same beside each token of the prompt; None computes none of them
    weight_version: VersionName = ""  # the only weights that may sample it; empty for any
    min_weight_version: VersionName = ""  # the oldest weights that may sample it; a gateway knows their order

    @property
    def demands_version(self) -> bool:
        return bool(self.weight_version or self.min_weight_version)


class Partial(msgspec.Struct, frozen=True):
    """The output of a request so far, on this engine and before: enough to continue it on another one."""

    token_ids: TokenIds = ()
    logprobs: LogProbabilities = ()
    spans: Annotated[tuple[VersionSpan, ...], Meta(max_length=SPANS_MAX)] = ()


class Request(msgspec.Struct, frozen=True):
    """One completion of one prompt. `partial` is what an earlier engine already produced of it."""

    request_id: Text
    prompt_ids: TokenIds
    sampling: Sampling = Sampling()
    tenant: Label = ""  # salt of the prefix cache: tenants never share blocks
    priority: Priority = 0  # lower runs first
    arrival_s: Finite = 0.0
    partial: Partial = Partial()

    def named(self, request_id: str, partial: Partial | None = None) -> Request:
        """Return the same request under another id, continued from `partial` if that is given."""
        start = partial if partial is not None else self.partial
        return Request(request_id, self.prompt_ids, self.sampling, self.tenant, self.priority, self.arrival_s, start)


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one step added to one request; the last event of a request carries its finish reason.

    `cached_tokens` is set on the first event only, and so is `prompt_logprobs`: of every token of the prompt but the
    first. A stop token is delivered, as the last one. On "abort" the tokens of all events so far are valid.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: str
    finish_reason: FinishReason | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    cached_tokens: int | None = None
    workers: tuple[str, ...] = ()  # of a pool: the workers that generated these tokens; a single engine leaves it empty
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """A snapshot of one engine; counters only grow."""

    version: str
    running: int
    waiting: int
    kv_blocks_limit: int
    kv_blocks_used: int  # referenced by requests
    kv_blocks_cached: int  # not referenced, kept for prefix hits
    block_tokens: int
    block_bytes: int
    max_context_tokens: int
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    batch_invariant: bool = True  # tokens do not depend on batching, chunking, prefix hits or preemption


@dataclass(frozen=True, slots=True)
class TurnSampling:
    """Sampling parameters of a turn. Training turns use the whole distribution; `top_p` and `top_k` are for others."""

    temperature: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0  # 0 means off


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """The output of one turn. A stop token is the last of `token_ids`."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish_reason: Literal["stop", "length"]
