"""Settings of the gateway: its door, how long turns wait there, how long a silent worker is believed.

host: 127.0.0.1
port: 8002
wait_s: 30
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rose.config.device import FrontSettings
from rose.config.schema import setting


@dataclass(frozen=True, slots=True)
class GatewaySettings(FrontSettings):
    port: int = setting(8002, "TCP port; 0 takes a free one", minimum=0, maximum=65535)
    max_body_bytes: int = setting(16 << 20, "largest request body", minimum=1024, maximum=1 << 30)
    obey_priority: bool = setting(True, "whether clients may choose the `priority` of their requests")
    model_name: str | None = setting(None, "name that clients use for the rollout model; the folder's if null")
    wait_s: float = setting(30.0, "longest a turn waits for a worker before the answer is 503", minimum=0.1)
    max_waiting: int = setting(4096, "most turns that wait; beyond it the answer is 429", minimum=0)
    lease_s: float = setting(5.0, "a worker silent for longer has lost its turns", minimum=0.2, maximum=3600)
    beat_s: float = setting(1.0, "how often workers say how they are", minimum=0.05, maximum=600)
    max_trajectories: int = setting(100_000, "most trajectories held at once; beyond it the answer is 429", minimum=1)
    max_kept_mb: int = setting(4096, "most memory for turns of all trajectories; beyond it: 429", minimum=1)
    max_session_mb: int = setting(512, "most memory for turns of one trajectory; beyond it: 429", minimum=1)
    idle_s: float = setting(3600.0, "a trajectory nobody touches for this long is forgotten", minimum=1)
    ledger: str | None = setting(None, "file that keeps trajectories when the gateway dies; null keeps them in memory")
    router: Literal["cost", "paper", "least", "sticky"] = setting("cost", "how a worker is chosen for a turn")
    max_staleness: int = setting(0, "versions of the weights that a worker may be behind", minimum=0, maximum=1000)
    borrowed_max: int | None = setting(None, "most serving devices borrowed at once; null borrows all", minimum=0)
    dedicated_max: int | None = setting(None, "most dedicated workers used at once; null uses all", minimum=0)
    return_after_s: float = setting(30.0, "a borrowed device that has nothing to do for longer goes back", minimum=0)
    gated_s: float = setting(1.0, "a turn whose worker's gate is shut for longer goes on elsewhere", minimum=0)
