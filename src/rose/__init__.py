"""ROSE: rollouts on devices that serve users.

The names below are the public API. Each is imported when it is first used, so that `import rose` costs nothing and a
client does not load a server.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rose.api.requests import TurnAnswer as TurnAnswer
    from rose.api.requests import TurnSampling as TurnSampling
    from rose.api.requests import VersionSpan as VersionSpan
    from rose.api.trajectories import Batch as Batch
    from rose.api.trajectories import BeginBody as BeginBody
    from rose.api.trajectories import FinishBody as FinishBody
    from rose.api.trajectories import FinishedGroup as FinishedGroup
    from rose.client import GatewayClient as GatewayClient
    from rose.core.trajectory import Trajectory as Trajectory
    from rose.envs.environment import Environment as Environment
    from rose.envs.environment import Outcome as Outcome
    from rose.envs.environment_registry import make_environment as make_environment
    from rose.envs.play import ChatFrame as ChatFrame
    from rose.envs.play import Episode as Episode
    from rose.envs.play import play as play
    from rose.models.model_folder import load_model_folder as load_model_folder
    from rose.sharded_client import ShardedGatewayClient as ShardedGatewayClient
    from rose.weights.publish import Publisher as Publisher
    from rose.weights.receive import Receiver as Receiver

__version__ = "0.2.0"

_PUBLIC = {
    "Batch": "rose.api.trajectories",
    "BeginBody": "rose.api.trajectories",
    "ChatFrame": "rose.envs.play",
    "Environment": "rose.envs.environment",
    "Episode": "rose.envs.play",
    "FinishBody": "rose.api.trajectories",
    "FinishedGroup": "rose.api.trajectories",
    "GatewayClient": "rose.client",
    "Outcome": "rose.envs.environment",
    "Publisher": "rose.weights.publish",
    "Receiver": "rose.weights.receive",
    "ShardedGatewayClient": "rose.sharded_client",
    "Trajectory": "rose.core.trajectory",
    "TurnAnswer": "rose.api.requests",
    "TurnSampling": "rose.api.requests",
    "VersionSpan": "rose.api.requests",
    "load_model_folder": "rose.models.model_folder",
    "make_environment": "rose.envs.environment_registry",
    "play": "rose.envs.play",
}
__all__ = sorted(["__version__", *_PUBLIC])


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rose' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
