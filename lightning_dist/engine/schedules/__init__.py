"""Pipeline schedules as data: which rank computes what, in which order, without torch."""

from lightning_dist.engine.schedules.registry import build_schedule
from lightning_dist.engine.schedules.simulator import StageCosts, simulate

__all__ = ["StageCosts", "build_schedule", "simulate"]
