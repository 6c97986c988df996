"""Checkpoints read and written without a strategy, in one file or as a directory of shards."""

from lightning_dist.engine.checkpoint.files import (
    is_sharded,
    load_full,
    load_sharded,
    save_full,
    save_sharded,
)

__all__ = ["is_sharded", "load_full", "load_sharded", "save_full", "save_sharded"]
