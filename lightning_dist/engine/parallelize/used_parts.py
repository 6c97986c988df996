"""Checks of the parts of a sharded model that a step uses.

All ranks gather a unit together, so they must run the same units. Inside a unit a rank may use any
of the parameters, as long as some rank uses each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist

from lightning_dist.engine.data_parallel.missing_gradients import parameters_without_gradient
from lightning_dist.engine.parallelize.composition import ParallelModule
from lightning_dist.engine.sharding.unit_agreement import UnitAgreement
from lightning_dist.engine.sharding.unused_parameters import UnusedParameters


class UsedParts:
    """Checks that all ranks use the same units, and that some rank uses each parameter.

    Args:
        composed: The user's module, made parallel.
        groups: Two gloo groups: the ranks that hold the same layers, and the ranks that compute a
            forward of these layers together.
        always: Whether to compare before each unit in all steps.
    """

    def __init__(
        self,
        composed: ParallelModule,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        *,
        always: bool,
    ) -> None:
        self._module = composed.module
        self._units = UnitAgreement(composed.module, composed.units, *groups, always=always)
        self._unused: UnusedParameters | None = None
        if composed.split is None and composed.shards:
            (root,) = composed.shards
            if UnusedParameters.are_supported_by(root):
                self._unused = UnusedParameters(
                    composed.module, root=root, units=composed.units, group=groups[0]
                )

    def begin_step(self) -> None:
        """Records the sharded parameters; call it before each training step."""
        if self._unused is not None:
            self._unused.begin_step()

    def keep_gradients(self) -> None:
        """Counts the parameters that have a gradient now as used in the coming update."""
        if self._unused is not None:
            self._unused.keep_gradients()

    def step(self, *, training: bool) -> AbstractContextManager[None]:
        """Returns the context manager for a step's forward.

        Collective: every rank that takes part in the forward must enter it.
        """
        return self._units.step(training=training)

    def without_gradient(self) -> list[str]:
        """Names the parameters without a gradient. Collective: every rank must call it.

        If ranks may use different parameters: those that no rank used in this update.
        """
        if self._unused is None:
            return parameters_without_gradient(self._module)
        return self._unused.end_update()

    def run_deferred_checks(self) -> None:
        """Runs the pending checks between two steps. Collective: every rank must call it."""
        self._units.run_deferred_checks()
