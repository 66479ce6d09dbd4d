"""The owner's controls beside a `vllm serve`: the routes and the status that `rose lend` knows from any lent device.

They listen on the loopback in the agent's process, since the serving port is vLLM's own. `drain` gives the engine's KV
memory back to the machine, and `remove` no more than that: vLLM keeps the weights as long as the engine runs.
vllm_status.py has what is told.

`/metrics` at the same port has the figures of any lent device and the agent's of weights; as there, it needs no token.
"""

from __future__ import annotations

from aiohttp import web

from rose.coserve.messages import LendingStatus
from rose.coserve.owner import DRAINED, PAUSED
from rose.engines.vllm.desk import Status
from rose.errors import RequestRefused, RoseError
from rose.front.answering import json_response
from rose.front.control import ACTIONS, READER, ControlBody
from rose.front.failures import Failure, failure_of
from rose.front.lending import mirror_lending
from rose.front.metrics import LABEL, mirror_facts
from rose.front.tokens import check_bearer
from rose.observe.metrics import CONTENT_TYPE, Metrics
from rose.rollout.vllm_agent import VllmSeat
from rose.rollout.vllm_status import lending_status_of

REMOVED = f"{DRAINED}; vLLM keeps the weights until `rose lend vllm` ends"


class VllmOwner:
    """One per agent."""

    def __init__(self, seat: VllmSeat, token: str) -> None:
        self._seat, self._token = seat, token
        self._resumes, self._is_drained = 0, False
        self.metrics = Metrics()
        self._mirror(self.metrics)

    def application(self) -> web.Application:
        application = web.Application()
        application.add_routes(
            [
                web.get("/rose/lending", self._status_route),
                web.post("/rose/lending/{action}", self._control_route),
                web.get("/metrics", self._metrics_route),
            ]
        )
        return application

    async def obey(self, action: str, body: ControlBody) -> LendingStatus:
        """Raises RequestRefused for what is no share, Unavailable without an engine."""
        match action:
            case "pause":
                await self._stop(PAUSED)
            case "drain" | "remove":
                self._is_drained = True
                await self._stop(DRAINED if action == "drain" else REMOVED, kv_bytes=0)
            case "resume":
                await self._resume()
            case "dry-run":
                await self._seat.want(dry_run=True)
            case "limits":
                await self._limit(body)
        return self.status()

    async def _stop(self, why: str, **changes: object) -> None:
        self._seat.stopped = why
        await self._seat.want(**changes)

    async def _resume(self) -> None:
        self._seat.stopped, self._is_drained = "", False
        self._resumes += 1
        await self._seat.want(dry_run=False, resumes=self._resumes, kv_bytes=self._kv_bytes())

    async def _limit(self, body: ControlBody) -> None:
        """While drained, a share of the memory holds from `resume` on."""
        for name, share in (("memory", body.memory_share), ("compute", body.compute_share)):
            if share is not None and not 0 <= share <= 1:
                raise RequestRefused(f"a {name} limit of {share} is not a share", hint="give 0 to 1")
        if body.memory_share is not None:
            self._seat.memory_share = body.memory_share
            if not self._is_drained:
                await self._seat.want(kv_bytes=self._kv_bytes())
        if body.compute_share is not None:
            await self._seat.want(compute_share=body.compute_share)

    def _kv_bytes(self) -> int | None:
        whole, share = self._seat.lending.engine.kv_memory_mb << 20, self._seat.memory_share
        return int(share * whole) if share < 1 else None

    def status(self) -> LendingStatus:
        return lending_status_of(self._seat)

    # Figures

    def _mirror(self, metrics: Metrics) -> None:
        seat = self._seat
        mirror_lending(metrics, lambda: self.status() if seat.status is not None else None)
        mirror_facts(metrics, lambda: seat.facts, {LABEL: seat.lending.engine.model.name})
        what = "1 while rollout steps may run, 0 while they may not or there is no engine."
        metrics.mirror("gauge", "rose_gate_open", what, lambda: float((seat.status or Status(0)).gate_open))
        what = "Times the rollout engine was started again."
        metrics.mirror("counter", "rose_engine_restarts", what, lambda: seat.restarts)

    async def _metrics_route(self, request: web.Request) -> web.Response:
        return web.Response(body=self.metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    # Routes

    async def _status_route(self, request: web.Request) -> web.Response:
        return await self._answered(request, "status")

    async def _control_route(self, request: web.Request) -> web.Response:
        return await self._answered(request, request.match_info["action"])

    async def _answered(self, request: web.Request, action: str) -> web.Response:
        try:
            check_bearer(request, self._token)
            if action == "status":
                return json_response(self.status())
            if action not in ACTIONS:
                raise Failure(404, f"there is no action `{action[:40]}`; there are {', '.join(ACTIONS)}")
            raw = await request.read()
            return json_response(await self.obey(action, READER.read(raw) if raw else ControlBody()))
        except Failure as failure:
            return failure.response()
        except RoseError as error:
            return failure_of(error).response()
