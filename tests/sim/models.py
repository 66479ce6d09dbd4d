"""Latency models that have learnt a made-up device; they live with the simulation."""

from rose.sim.models import learnt

__all__ = ["learnt"]
