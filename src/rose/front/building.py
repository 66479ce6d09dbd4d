"""Puts a `Front` together from a model folder, its settings and an engine."""

from __future__ import annotations

from rose.config.device import FrontSettings
from rose.front.context import Front
from rose.front.handle import EngineHandle
from rose.front.lending import LendingDesk
from rose.front.metrics import FrontMetrics
from rose.models.folder import ModelFolder
from rose.observe.metrics import Metrics


def build_front(
    folder: ModelFolder,
    name: str | None,
    settings: FrontSettings,
    engine: EngineHandle,
    *,
    metrics: Metrics | None = None,
    token: str | None = None,
    api_key: str | None = None,
    desk: LendingDesk | None = None,
) -> Front:
    name = name or folder.name
    tokenizer = folder.tokenizer
    longest = max((len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.size)), default=1)
    figures = FrontMetrics(name, lambda: engine.facts, metrics)
    return Front(
        name,
        folder.spec.vocabulary,
        tokenizer,
        engine,
        figures,
        settings,
        max(1, longest),
        token=token,
        api_key=api_key,
        desk=desk,
    )
