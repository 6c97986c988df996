"""Predictions from sizes and costs: partitions, balance, memory and traffic, without torch."""

from lightning_dist.engine.planning.partition import partition_layers

__all__ = ["partition_layers"]
