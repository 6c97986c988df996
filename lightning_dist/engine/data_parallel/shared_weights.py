"""Weights in memory that all processes of a host share and write to without locks.

Recht et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent"
(NeurIPS 2011). ``Tensor.share_memory_`` shares with processes that are forked, or are sent the
tensor by ``multiprocessing``. Ranks are started by a launcher and have no such parent, so they map
one file in memory.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import gather_objects

_ALIGNMENT = 64
_MEMORY = "/dev/shm"  # noqa: S108  (a file system in memory, on Linux)


class SharedWeights:
    """Parameters that move into shared memory and out. Collective: every rank must create it.

    They are there while ranks train. Elsewhere hooks may change weights, on each rank alike. They
    are on the CPU, and of the same shapes on each rank of the gloo group.

    Raises:
        ValueError: The ranks are on several hosts.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._parameters, self._group = parameters, group
        self.is_shared = False  # whether the parameters are in shared memory now
        hosts = sorted(set(gather_objects(socket.gethostname(), group)))
        if len(hosts) > 1:
            raise ValueError(
                f"HogwildStrategy needs all ranks on one host, which share memory, and they are on"
                f" {hosts}. Use ParameterServerStrategy(mode='async') across hosts."
            )
        begins, end = [], 0
        for parameter in parameters:
            begins.append(end)
            end += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        path = [""]
        is_first = dist.get_rank(group) == 0
        if is_first:
            folder = _MEMORY if os.path.isdir(_MEMORY) else None
            file, path[0] = tempfile.mkstemp(prefix="hogwild-", dir=folder)
            os.truncate(file, max(end, 1))
            os.close(file)
        dist.broadcast_object_list(path, group_src=0, group=group)
        memory = torch.from_file(path[0], shared=True, size=max(end, 1), dtype=torch.uint8)
        self._views: list[Tensor] = []
        for parameter, begin in zip(parameters, begins, strict=True):
            piece = memory[begin : begin + parameter.nbytes]
            self._views.append(piece.view(parameter.dtype).view(parameter.shape))
        dist.barrier(group)
        if is_first:
            Path(path[0]).unlink()  # the memory stays until the last process has let go of it

    def share(self) -> None:
        """Moves the first rank's weights into shared memory. Collective."""
        dist.barrier(self._group)  # no rank reads there any more
        if dist.get_rank(self._group) == 0:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                view.copy_(parameter.detach())
        dist.barrier(self._group)
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.data = view
        self.is_shared = True

    def part(self, *, failed: bool = False) -> None:
        """Gives each rank weights of its own, behind the updates of all if none has failed.

        Raises:
            ValueError: An optimizer or a hook has replaced a parameter's data.
        """
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if not failed and parameter.data_ptr() != view.data_ptr():
                raise ValueError(
                    f"The data of a parameter of shape {tuple(parameter.shape)} has been replaced,"
                    " so other ranks do not see its updates. Write to parameters in place"
                    " (`p.copy_(...)`, not `p.data = ...`), and use an optimizer that does."
                )
        if not failed:
            dist.barrier(self._group)
        for parameter in self._parameters:
            parameter.data = parameter.detach().clone()
        self.is_shared = False
