"""Which parts of a sharded model a step uses: the same units on all ranks, whichever parameters.

What a unit holds is gathered by all ranks together, so that they must run the same ones. Which
parameters a rank uses inside of them is its own business, as long as some rank uses each.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch.distributed as dist

from lightning_dist.engine.comms.store_notes import RankNotes
from lightning_dist.engine.data_parallel.checks import (
    check_gradients,
    parameters_without_gradient,
)
from lightning_dist.engine.parallelize.composition import ParallelModule
from lightning_dist.engine.sharding.unit_agreement import UnitAgreement
from lightning_dist.engine.sharding.unused_parameters import UnusedParameters


class UsedParts:
    """Compares what ranks use.

    Args:
        composed: The user's module, made parallel.
        groups: Gloo groups: of the ranks that hold the same layers, and of those that compute a
            forward of them together.
        always: Whether to compare before each unit and in all steps.
        is_alone: Whether there is no other rank.
        make_notes: Makes what the ranks of a group leave notes in.
    """

    def __init__(
        self,
        composed: ParallelModule,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        *,
        always: bool,
        is_alone: bool,
        make_notes: Callable[[dist.ProcessGroup], RankNotes],
    ) -> None:
        self._module = composed.module
        self._units = UnitAgreement(composed.module, composed.units, *groups, always=always)
        self._unused: UnusedParameters | None = None
        if composed.split is None and composed.shards:
            (root,) = composed.shards
            if UnusedParameters.are_supported_by(root):
                # Gradients that are not there must be none before an update that needs them. Steps
                # of manual optimization leave some out in each backward, and a rank alone may.
                waits = always or is_alone or composed.is_manual
                notes = make_notes(groups[0])
                self._unused = UnusedParameters(
                    composed.module, root, composed.units, notes, groups[0], always=waits
                )

    def begin_step(self) -> None:
        """Looks at the parameters while they are sharded; call it before each training step."""
        if self._unused is not None:
            self._unused.begin_step()

    def keep_gradients(self) -> None:
        """Takes the parameters that have gradients by now for used, in the coming update."""
        if self._unused is not None:
            self._unused.keep_gradients()

    def step(self, *, training: bool) -> AbstractContextManager[None]:
        """Gives what a step's forward runs in; all ranks that take part in it must enter it.

        Args:
            training: Whether its result will be differentiated.
        """
        return self._units.step(training=training)

    def without_gradient(self) -> list[str]:
        """Names the parameters that an update's backwards have not reached; all ranks call it.

        Where ranks may use different ones, those that none has used, in this update or the last.
        """
        if self._unused is None:
            return parameters_without_gradient(self._module)
        return self._unused.end_update()

    def run_deferred_checks(self) -> None:
        """Checks what the ranks have run so far; all of them call it between two steps.

        Raises:
            ValueError: They have run different units, or none has used some parameters.
        """
        self._units.run_deferred_checks()
        if self._unused is not None:
            check_gradients(self._unused.run_deferred_checks())
