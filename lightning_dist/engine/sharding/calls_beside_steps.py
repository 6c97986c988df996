"""Lets hooks call a sharded module: to draw samples at the end of an epoch, say.

A step runs inside of the sharded root, which gathers what no unit has. A hook that calls
``module(x)``, or one of the module's children, passes by the root. So such a call gathers by
itself, and frees the weights again. All ranks must make it, as they must run the same units in a
step. It records no graph: its weights would be gone in a backward. A checkpoint's recomputation in
the backward is of the step, though it is not inside of it.

A step may take gradients itself, by its input for an adversarial one. That is a backward, behind
which FSDP2 frees what the root has gathered for the step. What is called then gathers it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.sharding.fully_shard import reshard
from lightning_dist.engine.sharding.gathered import are_gathered, groups_of, holders, is_in_backward


class CallsBesideSteps:
    """Gathers for calls of a module and its children outside of steps.

    Args:
        module: The user's module.
        root: The sharded root, which runs the function that it is called with.
    """

    def __init__(self, module: nn.Module, root: nn.Module) -> None:
        self._root = root
        self._is_in_step = False
        self._depth = 0
        self._had_gradients = True
        self._groups = groups_of(cast(FSDPModule, root))
        for holder in holders(self._groups):
            holder.register_forward_pre_hook(self._gather_again, prepend=True)
        for called in (module, *module.children()):
            if any(True for _ in called.parameters()):
                # Ahead of a unit's own hook: FSDP2's root must be the first to be called.
                called.register_forward_pre_hook(self._begin, prepend=True)
                called.register_forward_hook(self._end, always_call=True)

    def __deepcopy__(self, memo: object) -> CallsBesideSteps:
        """Returns itself: a copy of the module has no root of its own."""
        return self

    @contextmanager
    def step(self) -> Iterator[None]:
        """Returns the context manager of a step, in which nothing is to be done."""
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _gather_again(self, *_: object) -> None:
        if self._is_in_step and not is_in_backward() and not are_gathered(self._groups):
            cast(FSDPModule, self._root).unshard()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self, *_: object) -> None:
        if self._is_in_step or is_in_backward():
            return
        if self._depth == 0:
            self._had_gradients = torch.is_grad_enabled()
            torch.set_grad_enabled(False)
            self._root(lambda: None)
            # Gathers what no unit has, where the root has freed it again.
            cast(FSDPModule, self._root).unshard()
        self._depth += 1

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, *_: object) -> None:
        if self._is_in_step or is_in_backward():
            return
        self._depth -= 1
        if self._depth == 0:
            reshard(self._root)
            torch.set_grad_enabled(self._had_gradients)
