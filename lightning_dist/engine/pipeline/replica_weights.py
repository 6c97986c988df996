"""What the losses of an update weigh, over the data replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_dist.engine.pipeline.loss_weights import mixed_weights


class ReplicaWeights:
    """Averages weights over the replicas, and sees to it that all have some or none has.

    A replica that has begun without weights goes on without them (its last stage says so if not),
    so where the samples count, replicas speak about it once.

    Args:
        group: The replicas; takes CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)
        self._have_none = False

    def average(self, weight: float | None) -> float | None:
        """Averages a weight; each replica must call it for each update.

        Args:
            weight: Of this replica's share; None where the samples count.

        Raises:
            ValueError: Some replicas have a weight and others have none.
        """
        if self._size == 1 or (weight is None and self._have_none):
            return weight
        summed = torch.tensor([weight or 0.0, float(weight is not None)], dtype=torch.float64)
        dist.all_reduce(summed, group=self._group)
        total, given = summed.tolist()
        if given not in (0.0, float(self._size)):
            raise mixed_weights()
        self._have_none = given == 0.0
        return total / self._size if given else None
