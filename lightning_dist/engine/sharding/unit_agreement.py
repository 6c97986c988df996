"""Detects ranks that run different units of a sharded model, before they gather together.

If one rank skips a block that another runs (layers dropped at random, experts chosen by the data),
gathers of different units meet: the step hangs, or computes with another unit's weights. So before
a unit runs, the ranks compare its index. After the first steps a rank only posts a fingerprint of
its units, which is read a step later. A hang is then detected by its timeout, or with ``always``.

The backward reduces a unit's gradients when it reaches the unit's inputs, or at its very end if no
input requires a gradient. So that the order is the same, inputs that require one on any rank are
made to on each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.tensors.tree import SwappedEntries, map_tensors, tensors_in

_STEPS_LOOKED_AT = 8
_ADVICE = (
    "Each unit is gathered by all ranks together, so a step must run the same modules on all of"
    " them: choose them by numbers that are the same on all ranks, make the module around them a"
    " unit, or use DDPStrategy(find_unused_parameters=True)."
)


class UnitAgreement:
    """Compares the units that the ranks run, in the first steps or in all of them.

    Args:
        module: The sharded model.
        units: Names of the units.
        training_group: A gloo group of all ranks: replicas meet in the backward.
        evaluation_group: A gloo group of the ranks that compute a forward together.
        always: Whether to compare each unit in all steps, at one message per unit.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        training_group: dist.ProcessGroup,
        evaluation_group: dist.ProcessGroup,
        *,
        always: bool,
    ) -> None:
        self._names = [*units, "the end of the step"]
        self._groups = {True: training_group, False: evaluation_group}
        self._always = always
        # Two counts, for replicas may evaluate different numbers of batches, and train as many.
        self._num_steps = {True: 0, False: 0}
        self._is_training = False
        self._ran: list[tuple[int, bool]] = []
        # Units with such inputs on some rank, by their place in a step, which may run one twice.
        self._differentiable: set[tuple[int, int]] = set()
        self._pending: dict[bool, tuple[dist.Work, Tensor]] = {}
        for index, name in enumerate(units):
            hook = partial(self._before_unit, index)
            # Ahead of FSDP2's own, which gathers.
            module.get_submodule(name).register_forward_pre_hook(
                hook, prepend=True, with_kwargs=True
            )

    @contextmanager
    def step(self, *, training: bool) -> Iterator[None]:
        """Returns the context manager for a step's forward, differentiated later if ``training``.

        Collective: every rank that takes part in the forward must enter it.

        Raises:
            ValueError: The ranks run different units.
        """
        self._is_training = training
        self._ran.clear()
        yield
        if self._compares_units:
            self._compare(len(self._names) - 1)
        else:
            self._read(training)
            digest = blake2b(repr(self._ran).encode(), digest_size=7).digest()
            fingerprint = int.from_bytes(digest, "little")
            extremes = torch.tensor([fingerprint, -fingerprint])
            group = self._groups[training]
            work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group, async_op=True)
            assert work is not None
            self._pending[training] = work, extremes
        self._num_steps[training] += 1

    def run_deferred_checks(self) -> None:
        """Reads the pending fingerprints between two steps. Collective: every rank must call it.

        Raises:
            ValueError: The ranks have run different units in the last step.
        """
        for training in list(self._pending):
            self._read(training)

    @property
    def _compares_units(self) -> bool:
        return self._always or self._num_steps[self._is_training] < _STEPS_LOOKED_AT

    # A unit may be inside of a compiled module, or compiled with its hooks by the user.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_unit(
        self, index: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        tensors = tensors_in((args, kwargs))
        is_training = torch.is_grad_enabled()
        is_own = is_training and any(tensor.requires_grad for tensor in tensors)
        place = len(self._ran), index
        # Without a message: alike on all ranks, for what comes before may have been unfrozen.
        is_any = self._compare(index, is_own) if self._compares_units else is_own
        if is_any:
            self._differentiable.add(place)
        self._ran.append((index, place in self._differentiable))
        if is_own or not is_training or place not in self._differentiable:
            return None
        changed: tuple[tuple[Any, ...], dict[str, Any]]
        given = args, kwargs
        changed = SwappedEntries().swap(given, map_tensors(_with_gradient, given))
        return changed

    def _read(self, training: bool) -> None:
        if training not in self._pending:
            return
        work, extremes = self._pending.pop(training)
        work.wait()
        if int(extremes[0]) != -int(extremes[1]):
            raise ValueError(
                "The ranks have run different units of the sharded model in a step that is over,"
                f" and may have computed with each other's weights. {_ADVICE} With"
                " find_unused_parameters=True the ranks compare before each unit and say which."
            )

    def _compare(self, index: int, is_differentiable: bool = False) -> bool:
        own = torch.tensor([index, int(is_differentiable)])
        group = self._groups[self._is_training]
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, own, group=group)
        found = [int(other[0]) for other in gathered]
        if len(set(found)) > 1:
            pairs = zip(dist.get_process_group_ranks(group), found, strict=True)
            where = ", ".join(f"rank {rank} at {self._names[i]!r}" for rank, i in pairs)
            raise ValueError(
                f"The ranks run different units of the sharded model: {where}. {_ADVICE}"
            )
        return any(bool(other[1]) for other in gathered)


def _with_gradient(tensor: Tensor) -> Tensor:
    # The gradient is not used.
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
