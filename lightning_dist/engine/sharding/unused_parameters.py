"""Lets the ranks of a sharded model use different parameters in a step, and finds unused ones.

FSDP2 reduces the gradients of a unit that exist. If other gradients exist on another rank, sums of
different parameters meet: the process ends, or silently trains on another parameter's gradient. So
all of a unit's gradients are reduced, with zeros for the missing ones. Then a gradient does not
show any more whether its parameter was used. Hooks on each rank record the parameters that a
backward reaches. A small all-reduce per update finds the parameters that no rank has reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.sharding.fully_shard import is_left_whole
from lightning_dist.engine.sharding.kept_gradients import KeptGradients


class UnusedParameters:
    """Finds the parameters that no rank's backward has reached since the last update.

    Args:
        module: The user's sharded module.
        roots: The roots, which are called and contain all units: one, or one for each stage.
        units: Names of the other units.
        group: A gloo group of the ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        roots: Sequence[FSDPModule],
        units: Sequence[str],
        group: dist.ProcessGroup,
    ) -> None:
        self._module = module
        self._group = group
        self._kept = KeptGradients(roots)
        self._sharded: dict[str, nn.Parameter] = {}
        self._units = ["", *units]
        self._not_hooked: dict[str, list[str]] = {}  # in each unit and those inside of it
        self._reached: set[str] = set()
        self._has_backward = False  # in this update
        for root in roots:
            root.set_reduce_scatter_unused_params(True)
            assert isinstance(root, nn.Module)
            root.register_forward_pre_hook(partial(self._hook_into, ""))
        for name in units:
            # After FSDP2's own hook, which gathers.
            module.get_submodule(name).register_forward_pre_hook(partial(self._hook_into, name))

    @staticmethod
    def are_supported_by(roots: Sequence[FSDPModule]) -> bool:
        """Returns whether FSDP2 can reduce zeros for missing gradients, as since torch 2.13."""
        return all(hasattr(root, "set_reduce_scatter_unused_params") for root in roots)

    def begin_update(self) -> None:
        """Forgets backwards for an update that never came."""
        self._reached.clear()
        self._has_backward = False

    def begin_step(self) -> None:
        """Records the sharded parameters; call it before each step's forward."""
        if not self._sharded:
            self._sharded = dict(self._module.named_parameters())
            self._not_hooked = {
                unit: [name for name in self._sharded if not unit or name.startswith(f"{unit}.")]
                for unit in self._units
            }

    def begin_backward(self) -> None:
        """Lets FSDP2 reduce gradients of several backwards, which have used other parameters."""
        self._kept.complete()

    def keep_gradients(self) -> None:
        """Counts parameters that have a gradient as used, if no backward of the update has run.

        It may be of the user's own accumulation, or zeros that ``zero_grad(set_to_none=False)``
        leaves, by which an optimizer still decays weights. Behind a backward FSDP2 has made zeros.
        """
        if not self._has_backward:
            self._reached |= {n for n, p in self._sharded.items() if p.grad is not None}
        self._has_backward = True

    def end_update(self) -> list[str]:
        """Ends the backward that completes an update. Collective: every rank must call it.

        Parameters that are whole on each rank must have their gradients' average, if any has one.

        Returns:
            Names of the parameters that no rank has used in this update; the same on all ranks.
        """
        found = list(self._sharded.items())
        reached = self._reached | {n for n, p in found if is_left_whole(p) and p.grad is not None}
        unused = [p.requires_grad and name not in reached for name, p in found]
        self.begin_update()
        by_all = torch.tensor(unused, dtype=torch.uint8)
        dist.all_reduce(by_all, dist.ReduceOp.MIN, self._group)
        return [name for (name, _), flag in zip(found, by_all.tolist(), strict=True) if flag]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _hook_into(self, unit: str, *_: object) -> None:
        waiting = self._not_hooked.get(unit, [])
        hooked = {name for name in waiting if self._hook(name)}
        if hooked:
            for names in self._not_hooked.values():
                names[:] = [name for name in names if name not in hooked]

    def _hook(self, name: str) -> bool:
        known = self._sharded[name]
        if not known.requires_grad or is_left_whole(known):
            return False
        parameter = self._module.get_parameter(name)
        # While a unit is gathered it has other parameters, the same ones each time. Those of a unit
        # in this one may be frozen still, as they were gathered, until it is called itself.
        if parameter is known or not parameter.requires_grad:
            return False
        # The hook holds names only: torch hides a hook's references from the garbage collector, so
        # a hook that referred to the parameter's module would keep the module alive for ever.
        parameter.register_post_accumulate_grad_hook(partial(_reach, self._reached, name))
        return True


def _reach(reached: set[str], name: str, _: object) -> None:
    reached.add(name)
