"""Gathering of small Python objects from all ranks of a group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns the values of all ranks of a gloo group, in their order. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
