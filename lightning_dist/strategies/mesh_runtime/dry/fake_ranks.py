"""One process as any rank of a large mesh, and tensors without values.

A rank's part of a mesh follows from sizes alone. torch can compute it without other processes: with
a process group whose collectives return at once, and with tensors without values. Unlike meta
tensors, such tensors report the CPU as their device, which FSDP2 insists upon. torch's own memory
estimators use the same private names.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_dist.engine.common.device_mesh import forget_meshes
from lightning_dist.engine.tensors.observers import OperationWatch, Watch


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank of a world without other processes.

    Raises:
        ValueError: This process is a rank of some world already.
    """
    if dist.is_initialized():
        raise ValueError(
            f"This process is rank {dist.get_rank()} of {dist.get_world_size()} already, and cannot"
            f" be rank {rank} of {world_size}. Call this before a process group is made (before"
            " `trainer.fit`), or in a process of its own."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    say_error = sys.excepthook
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = say_error  # torch's names the rank
        forget_meshes()


@contextmanager
def without_values(watch: Watch) -> Iterator[None]:
    """Creates all tensors inside without memory: they have a shape, but no values.

    Code that reads a value gets 1, 1.0 or True. So a step may take another branch than in training.

    Raises:
        ValueError: A shape depends on values.
    """
    try:
        # Some tensors of a module are neither parameters nor buffers.
        fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
        # What is compiled would be compiled for tensors without values, or never again.
        with (
            torch.compiler.set_stance("force_eager"),
            warnings.catch_warnings(),
            fake_tensors,
            _Watched(watch),
        ):
            warnings.filterwarnings("ignore", ".*no compiled frames")  # torch 2.12 says so
            yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"A shape depends on the values of a tensor ({error}), and there are none in a dry run."
            " Use `torch.where` or a mask in place of `nonzero` and boolean indices."
        ) from error


class _Watched(OperationWatch):
    """Passes operations to a watch, and returns a constant for values that do not exist."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _VALUE and DTensor not in types:
            return _one_like(args[0])
        return super().__torch_dispatch__(func, types, args, kwargs)


_VALUE = torch.ops.aten._local_scalar_dense.default


def _one_like(tensor: Tensor) -> Any:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1
