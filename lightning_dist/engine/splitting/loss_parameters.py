"""Trainable parameters that a step uses behind the pipelined module: a temperature, a head.

Only the last stage runs a step to its end, so these belong to it: to its versions of weights, its
gradients and its updates. On other ranks their modules stay in place without them.

What a step does ahead of the pipelined module runs on all stages. There, all but the last have NaNs
in place of these parameters, so that ``scale = self.scale.exp()`` may stand in any line. In the
first step of each mode, what is computed from them is marked (:class:`.DependenceWatch`), and must
reach neither the pipelined module nor a decision.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.splitting.removed_tensors import RemovedTensors
from lightning_dist.engine.tensors.module_tree import dotted, outermost, place_of
from lightning_dist.engine.tensors.observers import DependenceWatch
from lightning_dist.engine.tensors.patch import replaced
from lightning_dist.engine.tensors.skeleton import without_values

_KEPT_AS = "_lightning_dist_loss_parameters"  # in the user's module, from run to run
_MOST_NANS = 2**20
_WHERE = (
    "Trainable parameters outside of the pipelined module belong to the last stage, which computes"
    " the loss: use them in steps, behind the call of that module. What runs ahead of it must be"
    " part of it, like `nn.Sequential(first, *layers)`, or frozen with `requires_grad_(False)`."
)


class LossParameters:
    """The parameters of a user's module that its steps use behind the pipelined one; none at first.

    Attributes:
        module: The user's module, by which steps read them and the layers' parameters.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._removed = RemovedTensors(module)
        self._shapes: dict[str, Tensor] = {}
        self._device = torch.device("cpu")
        self._checked: set[bool] = set()  # by whether gradients are on
        self._watch: DependenceWatch | None = None
        self._is_in_step = self._has_grad = False

    @staticmethod
    def of(module: nn.Module) -> LossParameters:
        """Returns those of a module that an earlier run has cut, or none."""
        known = vars(module).get(_KEPT_AS)
        return known if isinstance(known, LossParameters) else LossParameters(module)

    # --- which -------------------------------------------------------------------------------

    @property
    def names(self) -> set[str]:
        """Their names in the user's module, all of a tied one."""
        return {*self._shapes}

    @property
    def foreign_names(self) -> set[str]:
        """The names of those that another rank has."""
        return self._removed.names

    @property
    def num_elements(self) -> int:
        """The sum of their sizes."""
        return sum(shape.numel() for shape in {id(s): s for s in self._shapes.values()}.values())

    def add(self, parameters: dict[str, nn.Parameter]) -> None:
        """Adds parameters that all ranks have so far; a tied one by all of its names."""
        by_identity: dict[int, Tensor] = {}
        for name, parameter in parameters.items():
            shape = by_identity.setdefault(id(parameter), without_values(parameter))
            self._shapes.setdefault(name, shape)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns those that this rank has, by their first names."""
        own = self.names - self.foreign_names
        return {name: p for name, p in self.module.named_parameters() if name in own}

    def modules(self) -> dict[str, nn.Module]:
        """Returns the outermost modules with no other parameters, as far as this rank has them."""
        found = {}
        for name, part in self.module.named_modules():
            own = [dotted(name, own_name) for own_name, _ in part.named_parameters()]
            if own and self._shapes.keys() >= {*own}:
                found[name] = part
        return {name: found[name] for name in outermost(found)}

    # --- where -------------------------------------------------------------------------------

    def put_into(self, stage: nn.Module) -> None:
        """Puts them into the module that runs the last stage's layers, under names of their own."""
        for name, parameter in self.parameters().items():
            stage.register_parameter(f"loss/{name.replace('.', '/')}", parameter)

    def settle(self, *, is_last: bool) -> None:
        """Removes them from the user's module on a rank without the last stage."""
        if self._shapes:
            vars(self.module)[_KEPT_AS] = self
        new = set() if is_last else self.names - self.foreign_names
        owners = {} if is_last else self.modules()
        self._removed.take(new)
        for name, owner in owners.items():
            owner.register_forward_pre_hook(partial(self._check_call, name))

    def as_empty(self, device: torch.device | None) -> AbstractContextManager[None]:
        """Returns a context manager with all of them in place, if without values."""
        return self._removed.as_empty(device)

    # --- steps -------------------------------------------------------------------------------

    def attach(self, device: torch.device) -> None:
        """Prepares for steps of stages on a device."""
        self._checked.clear()
        self._device = device

    @contextmanager
    def in_step(self, *, is_last: bool) -> Iterator[None]:
        """Returns the context manager for a user's step on a stage."""
        if is_last or not self._shapes:
            yield
            return
        self._is_in_step, self._has_grad = True, torch.is_grad_enabled()
        made = {id(shape): _nans(shape, self._device) for shape in self._shapes.values()}
        if self._has_grad not in self._checked:
            self._watch = DependenceWatch(self._refuse)
            self._watch.mark([*made.values()])
        named = self._shapes.items()
        places = [(*place_of(self.module, name), made[id(shape)]) for name, shape in named]
        try:
            with replaced(places), self._watch or nullcontext():
                yield
        finally:
            self._is_in_step, self._watch = False, None

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
        names = shorten(sorted(self._shapes))
        raise ValueError(f"A step uses one of {names} ahead of the pipelined module. {_WHERE}")


def _nans(shape: Tensor, device: torch.device) -> Tensor:
    """Returns NaNs that a step may write into, anew for each step, unless they are many."""
    if shape.numel() > _MOST_NANS:
        return torch.full((), math.nan, dtype=shape.dtype, device=device).expand(shape.shape)
    return torch.full(shape.shape, math.nan, dtype=shape.dtype, device=device)
