"""Where each data replica's loader is, in checkpoints.

A loader that can go on where it was has a state. Lightning saves that of rank 0 and loads it on all
ranks. That is right for a count of batches, and wrong for a reader of shards, whose replicas read
others and are elsewhere in them.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_dist.engine.common.gather import gather_objects

_KEY = "lightning_dist_loaders"
_LIGHTNINGS = "combined_loader"


def keep_loader_states(checkpoint: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Adds the states of all replicas' training loaders. Collective: every rank must call it."""
    states: list[dict[str, Any]] | None = _loop_state(checkpoint).get(_LIGHTNINGS)
    everyone = gather_objects(states, group)
    if all(states and any(states) for states in everyone):  # elastic ones have empty states
        checkpoint[_KEY] = everyone


def take_loader_states(checkpoint: dict[str, Any], replica: int, num_replicas: int) -> None:
    """Puts a replica's own states where Lightning looks for them."""
    everyone = checkpoint.pop(_KEY, None)
    if everyone is None:
        return
    if len(everyone) != num_replicas:
        rank_zero_warn(
            f"The checkpoint has the states of {len(everyone)} data replicas' loaders, and there"
            f" are {num_replicas} now. The epoch goes on where the first one was. To read no sample"
            " twice, resume on as many replicas, or from the end of an epoch."
        )
        replica = 0
    _loop_state(checkpoint)[_LIGHTNINGS] = everyone[replica]


def _loop_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state
