"""What things cost, by settings: what a run is priced at afterwards. Nothing here changes what a run does.

The defaults are those of the machine a run is on: a device is a core, at about the list price of a rented one. They
are assumptions, not measurements; docs/cost.md says where each comes from, and what to set for GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from rose.config.schema import setting


@dataclass(frozen=True, slots=True)
class CostSettings:
    dedicated_usd_per_hour: float = setting(0.04, "price of one device that the job holds for itself", minimum=0)
    dedicated_devices: int = setting(1, "devices the job holds: trainer and dedicated workers", minimum=1)
    serving_usd_per_hour: float = setting(0.04, "price of one serving device, which its users pay", minimum=0)
    energy_usd_per_hour: float = setting(0.001, "what a busy device draws more than an idle one", minimum=0)
    transfer_usd_per_gb: float = setting(0.0, "price of a GB of weights sent to a borrowed device", minimum=0)
    memory_price_share: float = setting(0.25, "share of a device's price that is its memory", minimum=0, maximum=1)
    breach_usd: float = setting(0.0001, "what one request costs that lending made late", minimum=0)
