"""Find ranks that run different units of a sharded model, before they gather for each other.

A unit's parameters come together in a collective, so all ranks must run the same units in the same
order. When one skips a block that another runs (layers dropped at random, experts chosen by the
data), gathers of different units meet: the step hangs, or computes with another unit's weights
without a sign. So before a unit runs the ranks say which it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

_STEPS_LOOKED_AT = 8


class UnitAgreement:
    """Compares the units that the ranks run, in the first steps or in all of them.

    Args:
        module: The model, sharded already.
        units: Names of its units.
        training_group: A gloo group of all ranks: replicas meet in the backward.
        evaluation_group: One of the ranks that compute a forward together.
        always: Whether to look at all steps; it takes a message for each unit.
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
        # Apart, for replicas may evaluate different numbers of batches, and train as many.
        self._num_steps = {True: 0, False: 0}
        self._is_training = False
        for index, name in enumerate(units):
            hook = partial(self._before_unit, index)
            # Ahead of FSDP2's own, which gathers.
            module.get_submodule(name).register_forward_pre_hook(hook, prepend=True)

    @contextmanager
    def step(self, *, training: bool) -> Iterator[None]:
        """Marks a step's forward; all ranks that take part in it must enter it.

        Args:
            training: Whether its result will be differentiated.

        Yields:
            Nothing.

        Raises:
            ValueError: The ranks run different units.
        """
        self._is_training = training
        yield
        self._compare(len(self._names) - 1)
        self._num_steps[training] += 1

    def _before_unit(self, index: int, *_: object) -> None:
        self._compare(index)

    def _compare(self, index: int) -> None:
        if not self._always and self._num_steps[self._is_training] >= _STEPS_LOOKED_AT:
            return
        own, group = torch.tensor([index]), self._groups[self._is_training]
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, own, group=group)
        found = [int(other) for other in everyone]
        if len(set(found)) > 1:
            pairs = zip(dist.get_process_group_ranks(group), found, strict=True)
            where = ", ".join(f"rank {rank} at {self._names[i]!r}" for rank, i in pairs)
            raise ValueError(
                f"The ranks run different units of the sharded model: {where}. Each unit is"
                " gathered by all ranks together, so a step must run the same modules on all of"
                " them: choose them by numbers that are the same on all ranks, make the module"
                " around them a unit, or use DDPStrategy(find_unused_parameters=True)."
            )
