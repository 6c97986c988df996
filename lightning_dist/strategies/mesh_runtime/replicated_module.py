"""The user's module on a mesh whose ranks have nothing to share but gradients.

FSDP2 would run there, too, with one shard per replica. But its copies, and optimizers on DTensors,
take time and memory that whole parameters do not: on two CPU ranks a quarter of a GPT's step. So
each rank has a :class:`.WrappedReplica`, as under :class:`~lightning_dist.DDPStrategy`, or on a
single rank the module as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.engine.data_parallel.wrapped_replica import ReplicaOptions, WrappedReplica
from lightning_dist.engine.parallelize.composition import ParallelModule
from lightning_dist.strategies.base.run_setup import StepContext
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule


class ReplicatedModule(ShardedModule):
    """This rank's replica.

    Args:
        composed: The user's module, whose units compile and recompute, and are not sharded.
    """

    def __init__(self, composed: ParallelModule) -> None:
        super().__init__(composed, None)
        self._replica: WrappedReplica | None = None
        self._is_local: Callable[[], bool] = bool

    @property
    @override
    def is_manual(self) -> bool:
        return not self.module.automatic_optimization

    def open_replica(self, options: ReplicaOptions, is_local: Callable[[], bool]) -> None:
        """Begins a fit with other replicas."""
        self._replica = WrappedReplica(self.module, options)
        self._is_local = is_local

    @override
    def close(self, *, failed: bool) -> None:
        super().close(failed=failed)
        replica, self._replica = self._replica, None
        if replica is not None:
            replica.close(failed=failed)

    @override
    def begin_batch(self) -> None:
        if self._replica is not None:
            self._replica.begin_batch(is_local=self._is_local())

    @override
    def train(
        self, step: Callable[..., Any], context: StepContext, *args: Any, **kwargs: Any
    ) -> Any:
        if self._replica is None:
            return super().train(step, context, *args, **kwargs)
        with context():
            return self._replica.run(step, *args, is_local=self._is_local(), **kwargs)

    @override
    def backward(
        self, loss: Tensor, default: Callable[[], Tensor], *, accumulating: bool
    ) -> Tensor:
        if self._replica is not None:
            self._replica.begin_backward(loss, is_local=self._is_local())
        return super().backward(loss, default, accumulating=accumulating)

    @override
    def add_gradients(self) -> None:
        if self._replica is not None:
            self._replica.end_backward(is_local=self._is_local())

    @override
    def update(
        self, optimizer: Optimizer, closure: Callable[[], Any], apply: Callable[[], Any]
    ) -> Any:
        if self._replica is not None and not self._is_local():
            self._replica.wrap()
            return apply()
        with self.no_sync():
            return apply()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with nullcontext() if self._replica is None else self._replica.keeping_gradients():
            yield
