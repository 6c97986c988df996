"""Wrap policies: which modules FSDP2 shards as one unit each."""

from lightning_dist.engine.sharding.wrap import (
    AnyOf,
    ByClass,
    ByName,
    BySize,
    EachBlock,
    Manual,
    Unit,
    With,
    WrapPolicy,
)

__all__ = [
    "AnyOf",
    "ByClass",
    "ByName",
    "BySize",
    "EachBlock",
    "Manual",
    "Unit",
    "With",
    "WrapPolicy",
]
