"""Ranks that read the same data draw the same random numbers, seeded or not.

Shuffling, augmentation in the main process and whatever a step draws before it calls the model come
from the global generators. Scripts that nobody seeded start each process with others.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def share_random_state(group: dist.ProcessGroup) -> None:
    """Gives all ranks of a group the first one's generators: Python's, numpy's and torch's.

    Args:
        group: A gloo group of the ranks that read the same data.
    """
    if dist.get_world_size(group) == 1:
        return
    states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    dist.broadcast_object_list(states, group_src=0, group=group)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
