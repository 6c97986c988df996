"""Entries of a checkpoint that are neither weights nor an optimizer's state, such as a callback's.

A callback's own average of the weights has a rank's shards. Written as they are, they would come
back on all ranks as the first rank's.
"""

from __future__ import annotations

from typing import Any

from lightning_dist.engine.checkpoint.files import OPTIMIZERS, SECTIONS
from lightning_dist.engine.tensors.dtensor import is_dtensor, whole
from lightning_dist.engine.tensors.tree import map_tensors, tensors_in


def gather_others(checkpoint: dict[str, Any]) -> None:
    """Makes the tensors whole that other entries have in shards. Collective.

    Every rank must call it, with entries of the same structure on ranks that share parameters out.
    """
    for key in sorted(checkpoint.keys() - SECTIONS.keys() - OPTIMIZERS.keys()):
        if any(map(is_dtensor, tensors_in(checkpoint[key]))):
            checkpoint[key] = map_tensors(whole, checkpoint[key])
