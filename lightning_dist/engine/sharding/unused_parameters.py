"""Lets the ranks of a sharded model use different parameters in a step, and finds unused ones.

FSDP2 reduces the gradients of a unit that exist. If other gradients exist on another rank, sums of
different parameters meet: the process ends, or silently trains on another parameter's gradient. So
all of a unit's gradients are reduced, with zeros for the missing ones. Then a gradient does not
show any more whether its parameter was used. Hooks on each rank record the parameters that a
backward reaches. Parameters that no rank has reached are found by notes, as in
:mod:`.data_parallel.missing_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.comms.store_notes import RankNotes, finish

_UPDATES_LOOKED_AT = 8


class UnusedParameters:
    """Finds the parameters that no rank's backward has reached since the last update.

    In the first updates, or in all of them, the ranks wait for each other's notes, and report an
    error before the optimizer steps. Later they read the notes after the next update's backward,
    which has received gradients from all ranks.

    Args:
        module: The user's sharded module.
        root: The root, which is called and contains all units.
        units: Names of the other units.
        notes: Store for the notes of the ranks.
        group: A gloo group of the ranks.
        always: Whether to wait for the notes in all updates.
    """

    def __init__(
        self,
        module: nn.Module,
        root: FSDPModule,
        units: Sequence[str],
        notes: RankNotes,
        group: dist.ProcessGroup,
        *,
        always: bool,
    ) -> None:
        self._module = module
        self._notes = notes
        self._group = group
        self._always = always
        self._sharded: dict[str, nn.Parameter] = {}
        self._units = ["", *units]
        self._not_hooked: dict[str, list[str]] = {}  # in each unit and those inside of it
        self._reached: set[str] = set()
        self._num_updates = 0
        self._unsettled: list[int] = []
        root.set_reduce_scatter_unused_params(True)
        assert isinstance(root, nn.Module)
        root.register_forward_pre_hook(partial(self._hook_into, ""))
        for name in units:
            # After FSDP2's own hook, which gathers.
            module.get_submodule(name).register_forward_pre_hook(partial(self._hook_into, name))

    @staticmethod
    def are_supported_by(root: FSDPModule) -> bool:
        """Returns whether FSDP2 can reduce zeros for missing gradients, as since torch 2.13.

        Args:
            root: The sharded root.
        """
        return hasattr(root, "set_reduce_scatter_unused_params")

    def begin_step(self) -> None:
        """Records the sharded parameters; call it before each step's forward."""
        if not self._sharded:
            self._sharded = dict(self._module.named_parameters())
            self._not_hooked = {unit: self._names_in(unit) for unit in self._units}

    def keep_gradients(self) -> None:
        """Counts the parameters that have a gradient now as used in the coming update.

        It is for steps that call backward by themselves, each for some of the parameters.
        """
        self._reached |= {n for n, p in self._sharded.items() if p.grad is not None}

    def end_update(self) -> list[str]:
        """Ends the backward that completes an update. Collective: every rank must call it.

        Returns:
            Names of the parameters that no rank has used in this update, or in the update before if
            the ranks do not wait; the same on all ranks.
        """
        before = self._common()
        self._num_updates += 1
        rows = enumerate(self._sharded.items())
        self._unsettled = [i for i, (n, p) in rows if p.requires_grad and n not in self._reached]
        self._reached.clear()
        if self._unsettled:
            self._notes.leave(self._num_updates, self._unsettled)
        if self._always or self._num_updates <= _UPDATES_LOOKED_AT:
            return self.run_deferred_checks()
        return before

    def run_deferred_checks(self) -> list[str]:
        """Waits for all ranks' notes, between two steps. Collective: every rank must call it.

        Returns:
            Names of the parameters that no rank has used in the last update.
        """
        dist.barrier(self._group)
        found, self._unsettled = self._common(), []
        return found

    def _common(self) -> list[str]:
        if not self._unsettled:
            return []
        names = list(self._sharded)
        finish(self._sharded[names[0]].device)
        return [names[i] for i in self._notes.common(self._num_updates, self._unsettled)]

    def _names_in(self, unit: str) -> list[str]:
        return [name for name in self._sharded if not unit or name.startswith(f"{unit}.")]

    def _hook_into(self, unit: str, *_: object) -> None:
        waiting = self._not_hooked.get(unit, [])
        hooked = {name for name in waiting if self._hook(name)}
        if hooked:
            for names in self._not_hooked.values():
                names[:] = [name for name in names if name not in hooked]

    def _hook(self, name: str) -> bool:
        if not self._sharded[name].requires_grad:
            return False
        parameter = self._module.get_parameter(name)
        # While a unit is gathered it has other parameters, the same ones each time.
        if parameter is self._sharded[name]:
            return False
        # The hook holds names only: torch hides a hook's references from the garbage collector, so
        # a hook that referred to the parameter's module would keep the module alive for ever.
        parameter.register_post_accumulate_grad_hook(partial(_reach, self._reached, name))
        return True


def _reach(reached: set[str], name: str, _: object) -> None:
    reached.add(name)
