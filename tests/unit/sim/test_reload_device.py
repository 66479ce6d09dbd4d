"""A device whose two models take turns in its memory."""

from __future__ import annotations

from rose.core.slo import Budgets
from rose.engines.profiles import load_profile
from rose.sim.reload_device import ReloadDevice
from rose.sim.shapes import Arrival

SERVING, ROLLOUT = load_profile("h800-qwen2.5-7b"), load_profile("h800-qwen3-8b")


def test_a_request_waits_for_the_reload_and_a_quiet_device_lends() -> None:
    arrivals = [Arrival(0.1, 200, 5), Arrival(5.0, 200, 5)]
    device = ReloadDevice(SERVING, ROLLOUT, Budgets(0.5, 0.15), arrivals, 8.0, 0, lends=True, mode="idle", reload_s=0.7)
    timeline = device.run()
    first_s, second_s = (served.first_token_s - served.arrival.at_s for served in device.served)
    assert first_s < 0.5 and second_s > 0.7
    assert timeline.lent_s > 3.0 and timeline.attainment == 0.5
