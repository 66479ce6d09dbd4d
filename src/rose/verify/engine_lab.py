"""The engines of the kit: started when a step first needs them, shared by the steps that follow, ended when one fails.

Starting an engine takes most of the kit's time, so a step that leaves engines healthy leaves them running. All steps
share the device by time slices, also where an MPS daemon runs: the engines get an MPS folder without a daemon. Only
the step that is about MPS asks for the daemon's folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rose.core.admission import Mode
from rose.errors import ConfigError
from rose.models.presets import PRESETS, write_preset
from rose.verify.kit_results import KitSettings
from rose.verify.machine_facts import MPS_FOLDER_VARIABLE
from rose.verify.rollout_side import RolloutSide, lending_of, rollout_engine
from rose.verify.serving_process import ServingProcess
from rose.vllm.engine_process import USABLE, RolloutEngineSettings
from rose.vllm.vllm_agent import VllmEngineClient

PRESET = {True: "qwen3-3m", False: "qwen3-25m"}  # on a CPU, on a GPU


def model_folder(name: str, role: str, settings: KitSettings, folder: Path) -> Path:
    """Return a model's folder; that of a preset is made. Raises ConfigError for a name that is neither."""
    name = name or PRESET[settings.is_cpu]
    if (Path(name) / "config.json").is_file():
        return Path(name).absolute()
    if name not in PRESETS:
        hint = f"name a Hugging Face folder on this machine, or a preset: {', '.join(PRESETS)}"
        raise ConfigError(f"`{name}` is no model folder (it has no config.json) and no preset", hint=hint)
    path = folder / "models" / f"{role}-{name}"
    if not (path / "config.json").is_file():
        write_preset(name, path, seed=1 if role == "rollout" else 0, force=True)
    return path.absolute()


class EngineLab:
    """The engines of one process of the kit."""

    def __init__(self, settings: KitSettings, folder: Path, say: Callable[[str], None]) -> None:
        self.settings, self.folder, self._say = settings, folder, say
        self._serving: ServingProcess | None = None
        self._rollouts: RolloutSide | None = None
        self._lent: tuple[str, RolloutEngineSettings] | None = None  # beside which server, and what
        self._starts_s: dict[str, float] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    @property
    def time_slices(self) -> dict[str, str]:
        """Return the environment in which an engine shares a GPU by time slices, whatever daemon runs."""
        if self.settings.is_cpu:
            return {}
        empty = self.folder / "no-mps"
        empty.mkdir(exist_ok=True)
        return {MPS_FOLDER_VARIABLE: str(empty.absolute())}

    def take_starts(self) -> dict[str, float]:
        """Return the seconds that engines took to start since the last call."""
        starts_s, self._starts_s = self._starts_s, {}
        return starts_s

    def serving_model(self) -> Path:
        return model_folder(self.settings.serving, "serving", self.settings, self.folder)

    def rollout_model(self) -> Path:
        return model_folder(self.settings.rollout, "rollout", self.settings, self.folder)

    def new_serving(
        self, scheduler: str | None = None, environment: dict[str, str] | None = None, extra: Sequence[str] = ()
    ) -> ServingProcess:
        """Start another serving process, which the caller has to close."""
        log = self.folder / "logs" / "serving.log"
        chosen = self.time_slices if environment is None else environment
        return ServingProcess(
            self.settings, self.serving_model(), log, scheduler=scheduler, environment=chosen, extra=extra
        )

    async def serving(self, environment: dict[str, str] | None = None, extra: Sequence[str] = ()) -> ServingProcess:
        """Return the serving engine, started if none runs in this environment and with these flags.

        Raises Unavailable.
        """
        wanted, current = self.time_slices if environment is None else environment, self._serving
        if (
            current is not None
            and current.is_running
            and (current.environment, current.extra) == (wanted, tuple(extra))
        ):
            return current
        await self.close()
        self._say("starting the serving engine")
        began_s = time.monotonic()
        serving = self._serving = self.new_serving(environment=wanted, extra=extra)
        await serving.until_ready()
        self._starts_s["serving engine"] = time.monotonic() - began_s
        return serving

    def engine(self, environment: dict[str, str] | None = None) -> RolloutEngineSettings:
        chosen = self.time_slices if environment is None else environment
        return rollout_engine(self.settings, self.rollout_model(), chosen)

    async def rollouts(
        self,
        mode: Mode,
        *,
        is_gated: bool = True,
        environment: dict[str, str] | None = None,
        serving_environment: dict[str, str] | None = None,
        extra: Sequence[str] = (),
        sequences: int = 0,
    ) -> RolloutSide:
        """Return rollouts beside the serving engine, started if there are none on these terms. Raises RoseError.

        `environment` is that of both engines, unless serving has its own; `extra` are further flags of serving.
        `sequences` is how many turns may run at once, if not the usual number.
        """
        serving = await self.serving(environment if serving_environment is None else serving_environment, extra)
        engine = self.engine(environment)
        engine = replace(engine, max_sequences=sequences or engine.max_sequences)
        url = serving.url if is_gated else ""
        terms = url, engine
        if self._rollouts is not None and self._lent == terms and self._rollouts.client.status is not None:
            await self._rollouts.set_mode(mode)
            return self._rollouts
        await self.close_rollouts()
        self._keep_off_device()
        self._say("starting the rollout engine beside it")
        began_s = time.monotonic()
        side = self._rollouts = RolloutSide(VllmEngineClient(lending_of(self.settings, engine, url, mode)))
        await side.client.start()
        self._lent, self._starts_s["rollout engine"] = terms, time.monotonic() - began_s
        return side

    def _keep_off_device(self) -> None:
        """Leave the cores of a CPU device to the engines, as `rose lend vllm` does."""
        if self.settings.is_cpu:
            cores = set(RolloutEngineSettings(Path(), self.settings.device).cores)
            os.sched_setaffinity(0, USABLE - cores or USABLE)

    async def close_rollouts(self) -> None:
        side, self._rollouts = self._rollouts, None
        if side is not None:
            await side.close()

    async def close(self) -> None:
        """End both engines."""
        await self.close_rollouts()
        serving, self._serving = self._serving, None
        if serving is not None:
            await serving.close()
