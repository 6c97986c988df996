"""A stage's gradients in ``p.grad`` for a round, where FSDP2's hooks see them.

After a backward FSDP2 reduces the gradients that the backward has added to the parameters. It
detects the backward by hooks on its root's outputs. Only the last backward of a round is to reduce,
so each one is announced.

Where a schedule splits backwards, autograd goes from the middle of the graph to the weights, past
those hooks. So the root gets one more method that FSDP2 takes for a forward. Its output depends on
no parameter, so its backward is over at once, and FSDP2 reduces as after any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from typing_extensions import override

from lightning_dist.engine.pipeline.gradients import Backward, HeldGradients, have_shared_memory
from lightning_dist.engine.sharding.fully_shard import unshard

_EMPTY_FORWARD = "forward_of_nothing"


class ParamGradAccumulator(HeldGradients):
    """Accumulates a stage's gradients in ``p.grad`` for a round, and holds them afterwards.

    All gradients are for one update, since the schedule is synchronous.

    Args:
        root: Runs the stage's layers; sharded or not.
        context: Returns the context manager in which each backward runs.
        sends: Returns whether gradients are reduced in this round at all.
        before_last: Called before the last backward of a round, which frees gathered parameters.
        look: Called with the outputs of each whole backward before the backward runs.
    """

    runs_hooks = True

    def __init__(
        self,
        root: nn.Module,
        context: Callable[[], AbstractContextManager[None]] = nullcontext,
        sends: Callable[[], bool] = lambda: True,
        before_last: Callable[[], None] = lambda: None,
        look: Callable[[Sequence[Tensor]], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self._root = root
        self._context = context
        self._sends = sends
        self._before_last = before_last
        self._look = look
        self._announced: tuple[bool, bool] | None = None
        if not hasattr(root, _EMPTY_FORWARD):  # an earlier run of the same model has made it
            setattr(root, _EMPTY_FORWARD, _nothing)
            register_fsdp_forward_method(root, _EMPTY_FORWARD)
        # Where they are, for FSDP2 exchanges parameters, and a walk over all modules in each
        # backward takes milliseconds.
        self._places = [
            (name, root.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in root.named_parameters()
        ]
        self._num_left = 0
        self._before: dict[str, Tensor | None] = {}

    @override
    def begin_round(self, num_backwards: int) -> None:
        self._num_left = num_backwards
        self._before = {name: p.grad for name, p in self._parameters()}
        for _, parameter in self._parameters():
            parameter.grad = None

    @override
    def end_round(self) -> None:
        assert self._num_left == 0
        held = self._held.setdefault(0, {})
        for name, parameter in self._parameters():
            if parameter.grad is not None:
                held[name] = parameter.grad
            parameter.grad = self._before.pop(name)

    @override
    @contextmanager
    def input_backward(self, parameters: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
        with self._part():
            yield dict(self._parameters())  # FSDP2 uses the hooks of the parameters themselves

    @override
    @contextmanager
    def adding(
        self, parameters: Mapping[str, Tensor], given: Sequence[Tensor], update: int
    ) -> Iterator[None]:
        is_last = self._count_down()
        with self._part():
            yield
        self._keep_from(given)
        if isinstance(self._root, FSDPModule):
            self._announce(is_last=is_last)
            torch.autograd.backward(getattr(self._root, _EMPTY_FORWARD)())

    @override
    def clear(self) -> None:
        super().clear()
        self._before.clear()

    @override
    def run(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        update: int,
        backward: Backward = torch.autograd.backward,
    ) -> list[Tensor | None]:
        is_last = self._count_down()
        if outputs:
            self._look(outputs)
            self._announce(is_last=is_last)
            with self._context():
                backward(outputs, gradients)
        found = [tensor.grad for tensor in inputs]
        for tensor in inputs:
            tensor.grad = None
        self._keep_from([*gradients, *found])
        return found

    @contextmanager
    def _part(self) -> Iterator[None]:
        """Wraps a part of a backward, after which nothing is reduced."""
        self._announce(is_last=False)
        unshard(self._root)  # another micro-batch's forward may have freed the gathered parameters
        with self._context():
            yield

    def _announce(self, *, is_last: bool) -> None:
        sends = is_last and self._sends()
        if isinstance(self._root, FSDPModule) and self._announced != (is_last, sends):
            self._announced = is_last, sends  # each of these walks over all modules
            self._root.set_is_last_backward(is_last)
            self._root.set_reshard_after_backward(is_last)
            self._root.set_requires_gradient_sync(sends)

    def _count_down(self) -> bool:
        """Counts a backward; returns whether it is the round's last."""
        self._num_left -= 1
        if self._num_left == 0:
            self._before_last()
        return self._num_left == 0

    def _keep_from(self, others: Sequence[Tensor | None]) -> None:
        """Copies the gradients that share memory with other tensors."""
        parameters = [parameter for _, parameter in self._parameters()]
        are_shared = have_shared_memory([p.grad for p in parameters], others)
        for parameter, is_shared in zip(parameters, are_shared, strict=True):
            if is_shared:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.clone()

    def _parameters(self) -> list[tuple[str, nn.Parameter]]:
        found = [(name, getattr(owner, last)) for name, owner, last in self._places]
        return [(name, p) for name, p in found if p.requires_grad]


def _nothing() -> Tensor:
    return torch.zeros((), requires_grad=True)
