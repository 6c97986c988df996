"""Trainable parameters that a step uses behind the pipelined module: a temperature, a head.

Only the last stage runs a step to its end, so these belong to it: to its versions of weights, its
gradients and its updates. On other ranks their modules stay in place without them.

What a step does ahead of the pipelined module runs on all stages. There, all but the last have NaNs
in place of these parameters, so that ``scale = self.scale.exp()`` may stand in any line. In the
first step of each mode, what is computed from them is marked (:class:`.DependenceWatch`), and must
reach neither the pipelined module nor a decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.splitting.placed_parameters import PlacedParameters
from lightning_dist.engine.tensors.module_tree import dotted, outermost
from lightning_dist.engine.tensors.observers import DependenceWatch

_WHERE = (
    "Trainable parameters outside of the pipelined module belong to the last stage, which computes"
    " the loss: use them in steps, behind the call of that module. What runs ahead of it must be"
    " part of it, like `nn.Sequential(first, *layers)`, or frozen with `requires_grad_(False)`."
)


class LossParameters(PlacedParameters):
    """The parameters of a user's module that its steps use behind the pipelined one; none at first.

    Attributes:
        module: The user's module, by which steps read them and the layers' parameters.
        placeholders: The NaNs by name while a step runs on another stage than the last.
    """

    kept_as = "_lightning_dist_loss_parameters"
    is_first = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._checked: set[bool] = set()  # by whether gradients are on
        self._watch: DependenceWatch | None = None
        self._is_in_step = self._has_grad = False
        self.placeholders: dict[str, Tensor] = {}

    def modules(self) -> dict[str, nn.Module]:
        """Returns the outermost modules with no other parameters, as far as this rank has them."""
        found = {}
        for name, part in self.module.named_modules():
            own = [dotted(name, own_name) for own_name, _ in part.named_parameters()]
            if own and self.names >= {*own}:
                found[name] = part
        return {name: found[name] for name in outermost(found)}

    @override
    def finish_cut(self, *, is_here: bool) -> None:
        owners = {} if is_here else self.modules()
        super().finish_cut(is_here=is_here)
        for name, owner in owners.items():
            owner.register_forward_pre_hook(partial(self._check_call, name))

    @override
    def attach(self, device: torch.device) -> None:
        super().attach(device)
        self._checked.clear()

    @contextmanager
    def in_step(self, *, is_last: bool) -> Iterator[None]:
        """Returns the context manager for a user's step on a stage."""
        if is_last or not self.names:
            yield
            return
        self._is_in_step, self._has_grad = True, torch.is_grad_enabled()
        self.placeholders = unknown = self.unknown()
        if self._has_grad not in self._checked:
            self._watch = DependenceWatch(self._refuse)
            self._watch.mark(unknown)
        try:
            with self.in_place(unknown), self._watch or nullcontext():
                yield
        finally:
            self._is_in_step, self._watch, self.placeholders = False, None, {}

    @contextmanager
    def in_call(self, given: object) -> Iterator[None]:
        """Returns the context manager for the layers in a step.

        Args:
            given: What the step calls the pipelined module with.

        Raises:
            ValueError: It depends on these parameters, on a stage without them.
        """
        if self._watch is None:
            yield
            return
        if self._watch.has_marked(given):
            self._refuse()
        with self._watch.paused():
            yield
        self._checked.add(self._has_grad)

    def _check_call(self, name: str, owner: nn.Module, _: object) -> None:
        """Checks that a module that lacks parameters is called in steps only."""
        if not self._is_in_step:
            raise ValueError(f"{name!r} was called on a rank without its parameters. {_WHERE}")

    def _refuse(self) -> None:
        names = shorten(sorted(self.names))
        raise ValueError(f"A step uses one of {names} ahead of the pipelined module. {_WHERE}")
