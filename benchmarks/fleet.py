"""How fast a whole fleet obeys one order, and what the live page's events cost.

A gateway with a ledger, and a synthetic fleet: workers of one process that join by real WebSockets, whose engines are
scripts; all but one are lent devices that report users. `answer_ms` is from sending `drain` for all to the reply, which
the gateway gives when the order is durable. `parked_ms` is until the gateway knows from every device that its rollout
model is parked. Each is measured with a `resume` in between. `order_cpu_ms` is the processor time of the order alone in
the gateway's loop, without sockets. `first_event_kb` has all workers, `event_kb` what changed in a second.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import harness

sys.path.insert(0, str(harness.PROJECT))

from tests.integration.gateways import OPERATOR, TOKENS, RunningGateway, gateway

from rose.api.fleet_orders import OrderBody
from rose.api.worker_messages import Heartbeat, Join
from rose.config.server_settings import GatewaySettings
from rose.gateway.gateway_core import GatewayCore
from rose.models.presets import write_preset

COLUMNS = (
    "workers", "orders", "order_cpu_ms", "order_cpu_ms_high", "answer_ms", "answer_ms_high", "parked_ms",
    "parked_ms_high", "first_event_kb", "events", "event_kb", "event_kb_high", "page_kb",
)  # fmt: skip
HEADERS = {"Authorization": f"Bearer {OPERATOR}"}
PATIENCE_S = 120.0


def main() -> int:
    options = harness.parser(__doc__ or "")
    options.add_argument("--workers", type=int, nargs="+", default=[100, 1000], help="sizes of the fleet (100 1000)")
    arguments = options.parse_args()
    begun, rows = harness.machine(), []
    repeats = 3 if arguments.quick else 10
    with tempfile.TemporaryDirectory() as place:
        model = write_preset("qwen3-3m", Path(place) / "qwen3-3m", seed=arguments.seed)
        for workers in arguments.workers:
            ledger = Path(place) / f"{workers}.sqlite"
            with gateway(model, f"ledger={ledger}", "lease_s=60", "beat_s=1") as found:
                rows.append(asyncio.run(measured(found, model, workers, repeats)))
    harness.print_table(rows, COLUMNS)
    bars = [
        harness.wanted("one order to the largest fleet, answered, ms", rows[-1]["answer_ms_high"], 1000, at_most=True)
    ]
    result = {
        "benchmark": "fleet", "command": " ".join(sys.argv), "seed": arguments.seed, "quick": arguments.quick,
        "machine": begun, "rows": rows, "wanted": bars,
    }  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def order_cpu_ms(workers: int, repeats: int) -> list[float]:
    """Return the milliseconds of processor time of orders to drain so many devices, in a gateway without sockets."""
    core, taken_ms = GatewayCore("m", GatewaySettings()), []
    for number in range(workers):
        join = Join(f"device-{number:04}", "borrowed", "m", "0", 16, 4096, 4096)
        worker = core.join(join, lambda message: None, 0.0)
        core.receive(worker, Heartbeat(0, 0, 0, 4096, "0", True, can_park=True), 0.0)
    for _ in range(repeats):
        begin_s = time.process_time()
        core.fleet.apply(OrderBody(action="drain", all=True), "", 1.0)
        taken_ms.append((time.process_time() - begin_s) * 1e3)
        core.fleet.apply(OrderBody(action="resume", all=True), "", 1.0)
    return taken_ms


async def measured(found: RunningGateway, model: Path, workers: int, repeats: int) -> dict[str, Any]:
    """Return the row of a fleet of this size."""
    command = [sys.executable, "-m", "tests.integration.fleet_of_workers", found.url, model.name, "1", str(workers - 1)]
    fleet = subprocess.Popen(
        [*command, "0.01"], env=os.environ | TOKENS, cwd=harness.PROJECT, stdout=subprocess.DEVNULL
    )
    try:
        async with aiohttp.ClientSession(headers=HEADERS) as http:
            await until(http, found.url, lambda members: len(members) == workers)
            await asyncio.sleep(3)
            answers_ms, parked_ms = [], []
            for _ in range(repeats):
                begin_s = time.perf_counter()
                answers_ms.append(await order(http, found.url, "drain"))
                parked = lambda members: sum(one["place"] == "parked" for one in members) == workers - 1  # noqa: E731
                await until(http, found.url, parked)
                parked_ms.append((time.perf_counter() - begin_s) * 1e3)
                await order(http, found.url, "resume")
                await asyncio.sleep(2)
            sizes = await event_sizes(http, found.url, repeats + 5)
            async with http.get(f"{found.url}/ui") as reply:
                page_bytes = len(await reply.read())
    finally:
        fleet.kill()
        fleet.wait()
    cpu_ms = order_cpu_ms(workers, repeats)
    return {
        "workers": workers, "orders": repeats,
        "order_cpu_ms": round(statistics.median(cpu_ms), 1), "order_cpu_ms_high": round(max(cpu_ms), 1),
        "answer_ms": round(statistics.median(answers_ms), 1), "answer_ms_high": round(max(answers_ms), 1),
        "parked_ms": round(statistics.median(parked_ms), 1), "parked_ms_high": round(max(parked_ms), 1),
        "first_event_kb": round(sizes[0] / 1e3, 1), "events": len(sizes) - 1,
        "event_kb": round(statistics.median(sizes[1:]) / 1e3, 1), "event_kb_high": round(max(sizes[1:]) / 1e3, 1),
        "page_kb": round(page_bytes / 1e3, 1),
    }  # fmt: skip


async def order(http: aiohttp.ClientSession, url: str, action: str) -> float:
    """Order all workers, and return the milliseconds until the reply."""
    begin_s = time.perf_counter()
    async with http.post(f"{url}/v1/pool/orders", json={"action": action, "all": True}) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
    return (time.perf_counter() - begin_s) * 1e3


async def until(http: aiohttp.ClientSession, url: str, holds: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with http.get(f"{url}/v1/pool") as reply:
                if holds((await reply.json())["members"]):
                    return
            await asyncio.sleep(0.05)


async def event_sizes(http: aiohttp.ClientSession, url: str, count: int) -> list[int]:
    """Return the bytes of so many events of the live page, the first with all workers."""
    sizes, size = [], 0
    async with http.get(f"{url}/ui/events") as reply:
        async for data, _ in reply.content.iter_chunks():
            size += len(data)
            if data.endswith(b"\n\n"):
                sizes.append(size)
                size = 0
            if len(sizes) == count:
                break
    return sizes


if __name__ == "__main__":
    raise SystemExit(main())
