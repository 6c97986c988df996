"""One rank's replica under torch's DistributedDataParallel, through the steps of a run.

The wrapper does not support three things: parameters that are frozen or unfrozen between batches,
gradients that a step leaves out on some ranks, and steps that call backward themselves.

A replica is not wrapped before a step whose gradients are to be averaged. The wrapper's buckets
have the size of all gradients, and a single replica or one with local steps needs none. And with a
static graph the wrapper records the graph in its first backward and always averages there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.engine.data_parallel.ddp_options import (
    GradientExchange,
    prepare_for_backward,
    remove_gradient_hooks,
)
from lightning_dist.engine.data_parallel.missing_gradients import (
    MissingGradients,
    check_gradients,
    check_toggled,
    parameters_without_gradient,
)
from lightning_dist.engine.data_parallel.trainable_set import TrainableSet, average_left_gradients
from lightning_dist.engine.data_parallel.used_parameters import UsedParameters


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How replicas average their gradients."""

    exchange: GradientExchange
    group: DeviceGroup  # of the replicas, for the gradients
    control_group: dist.ProcessGroup  # of the replicas, on gloo
    make_notes: Callable[[], RankNotes]
    is_automatic: Callable[[], bool]  # whether the loop calls backward after a step, not the step


class WrappedReplica:
    """Runs the steps of a module that is equal on all ranks, and averages its gradients."""

    def __init__(self, module: nn.Module, options: ReplicaOptions) -> None:
        self._module = module
        self._options = options
        self._exchange = options.exchange
        self._is_automatic = options.is_automatic
        self._ddp: DistributedDataParallel | None = None
        self._keeps_gradients = False
        self._has_averaged = False
        self._start()

    def _start(self) -> None:
        self._parameters = {*self._module.parameters()}
        self._trainable = TrainableSet(self._module, self._options.control_group)
        finds_unused = self._exchange.find_unused_parameters
        self._used = UsedParameters(self._module) if finds_unused else None
        self._missing: MissingGradients | None = None
        if not (finds_unused or self._exchange.static_graph):
            self._missing = MissingGradients(self._module, self._options.make_notes())

    def knows(self, parameter: Tensor) -> bool:
        """Returns whether a parameter was in the module when it was looked at last."""
        return parameter in self._parameters

    def restart(self) -> None:
        """Looks at the module's parameters again. Collective: every rank must call it."""
        self.close(failed=False)
        self._start()

    def check_averaged(self) -> None:
        """Checks that the gradients of an update have come by this class, if the step makes them.

        Raises:
            ValueError: No backward has been announced so far.
        """
        is_usual = self._has_averaged or self._is_automatic() or self._options.group.size == 1
        if not is_usual and any(p.grad is not None for p in self._parameters):
            raise ValueError(
                "The gradients are this rank's own, so replicas would drift apart. With"
                " `automatic_optimization = False` call `self.manual_backward(loss)` in place of"
                " `loss.backward()`: it averages the gradients of all replicas."
            )

    @property
    def ddp(self) -> DistributedDataParallel:
        """The module in its present wrapper."""
        assert self._ddp is not None
        return self._ddp

    def wrap(self) -> None:
        """Wraps the module for a step whose gradients are averaged, if it is not wrapped.

        Collective: every rank must call it, outside of what changes parameters for a step.
        """
        if self._ddp is None:
            group = self._options.group.group
            self._ddp = self._exchange.wrap(self._module, group, self._used)

    def _unwrap(self) -> None:
        ddp, self._ddp = self._ddp, None
        if ddp is not None:
            remove_gradient_hooks(ddp)

    def begin_batch(self, *, is_local: bool) -> None:
        """Wraps the module, anew if other parameters are trainable now, or unwraps it.

        Collective: every rank must call it. The next optimizer step uses this replica's own
        gradients if it is local.

        Raises:
            ValueError: The ranks train different parameters, or nothing is left to train.
        """
        frozen = self._trainable.begin_batch()
        if frozen is not None and not is_local:
            average_left_gradients(frozen, self._options.group, self._options.control_group)
        if frozen is not None or is_local:
            self._unwrap()
        if not is_local and not (self._exchange.static_graph and self._is_automatic()):
            self.wrap()

    def run(
        self, step: Callable[..., Any], *arguments: Any, is_local: bool, **keywords: Any
    ) -> Any:
        """Runs a training step."""
        if is_local or (self._ddp is None and self._keeps_gradients):
            return step(*arguments, **keywords)
        self.wrap()  # an `optimizer_step` may run the closure by itself
        if self._is_automatic():
            return self.ddp(step, *arguments, **keywords)
        # The step calls backward itself; when it has returned there is nothing to prepare.
        with self.ddp.no_sync():
            return self.ddp(step, *arguments, **keywords)

    def begin_backward(self, loss: Tensor, *, is_local: bool) -> None:
        """Prepares for a backward."""
        if is_local:
            return
        self._has_averaged = True
        if not self._is_automatic():
            self.ddp.require_backward_grad_sync = True
            prepare_for_backward(self.ddp, loss)
            self.ddp.require_backward_grad_sync = False
        if self._used is not None:
            self._used.watch()
        if self._missing is not None:
            self._missing.begin_backward()

    def end_backward(self, *, is_local: bool) -> None:
        """Completes the gradients, if this backward was to average them.

        Raises:
            ValueError: The step has changed the trainable parameters, or one of them has no
                gradient on any rank.
        """
        if is_local or (self._is_automatic() and self._keeps_gradients):
            return
        self._trainable.check_step(exactly=self._is_automatic())
        if not self._exchange.find_unused_parameters:
            check_toggled(self._trainable.left_out())
            if self._missing is None:  # a static graph waits only for the gradients that it knows
                check_gradients(parameters_without_gradient(self._module))
            else:
                check_gradients(self._missing.end_backward())

    @contextmanager
    def keeping_gradients(self) -> Iterator[None]:
        """Returns a context manager in which a backward averages no gradients."""
        self._keeps_gradients = True
        try:
            with nullcontext() if self._ddp is None else self._ddp.no_sync():
                yield
        finally:
            self._keeps_gradients = False

    def close(self, *, failed: bool) -> None:
        """Removes the wrapper."""
        self._unwrap()
        self._trainable.close(failed=failed)
        if self._used is not None:
            self._used.close()
        if self._missing is not None:
            self._missing.close()
