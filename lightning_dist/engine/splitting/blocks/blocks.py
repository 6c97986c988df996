"""The blocks of a model that is more than a sequence: embeddings, like blocks, norm and head.

The model's own forward stays in place, and runs on each stage (:mod:`.blocks.block_forward`).
Each stage computes masks and position ids from the batch, which all stages read, so only a block's
output is sent. A layer is a block; the first layer includes the modules that run before the blocks,
the last those that run after them. So do parameters that the modules around the blocks hold
themselves, such as a class token. Modules without parameters are on all stages.

A stage of a Hugging Face model has outputs of its own layers only, so a request for those of all
layers raises an error. The cache, which such models keep by default, is turned off.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dist.engine.splitting.blocks.block_forward import BlockRoute
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.placed_parameters import PlacedParameters
from lightning_dist.engine.tensors.compiler import refuse_compiled, refuse_wrapper
from lightning_dist.engine.tensors.module_tree import dotted

_OF_ALL_LAYERS = ("output_hidden_states", "output_attentions", "output_router_logits")


def keywords_of_a_stage(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords that a model is called with on one stage, by those in the user's step.

    Raises:
        ValueError: The keywords or the model's configuration request outputs of all layers.
    """
    _check_outputs(model, keywords, {"use_cache": keywords.get("use_cache")})
    return without_cache(model, keywords)


def _check_outputs(model: nn.Module, keywords: Mapping[str, Any], more: Mapping[str, Any]) -> None:
    config = getattr(model, "config", None)
    asked = {name: keywords.get(name, getattr(config, name, None)) for name in _OF_ALL_LAYERS}
    wanted = [f"{name}={value!r}" for name, value in (asked | {**more}).items() if value]
    if wanted:
        raise ValueError(
            f"{', '.join(wanted)} asks {type(model).__name__} for something of all layers, but each"
            " stage has only its own. Leave it out of the call, and of the model's `config`; for"
            " such outputs run the model on a single device."
        )


def _check_inner_call(model: nn.Module, _: Any, keywords: Mapping[str, Any]) -> None:
    """Checks a call inside of the model's forward: hooks of blocks collect what it asks for."""
    _check_outputs(model, keywords, {})


def without_cache(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keywords of a model's call that keeps no cache, unless they request one."""
    takes_cache = "use_cache" in inspect.signature(type(model).forward).parameters
    if takes_cache and keywords.get("use_cache") is None:  # else the model's `config` decides
        return {**keywords, "use_cache": False}
    return dict(keywords)


class Blocks(Layers):
    """The blocks in one list or sequence of a model; arguments as for :class:`.BlockRoute`."""

    def __init__(
        self,
        module: nn.Module,
        path: str,
        before: Sequence[str],
        after: Sequence[str],
        direct: tuple[PlacedParameters, ...] = (),
    ) -> None:
        refuse_wrapper(module)
        refuse_compiled(module.get_submodule(path), path)
        # Not `named_children`, which lists a block once that is repeated.
        blocks = [f"{path}.{name}" for name in module.get_submodule(path)._modules]
        last = len(blocks) - 1
        super().__init__(
            module,
            [
                (*(before if index == 0 else ()), block, *(after if index == last else ()))
                for index, block in enumerate(blocks)
            ],
        )
        self.origin = f"the blocks of {path}"
        self._path = path
        self._direct = direct
        self._checks: list[RemovableHandle] = []
        self._route = BlockRoute(
            module,
            path=path,
            before=before,
            after=after,
            run=self.compiler.resume,
            direct=direct,
            loss_placeholders=lambda: self.loss_parameters.placeholders,
        )

    @property
    @override
    def placed(self) -> tuple[PlacedParameters, ...]:
        return (*super().placed, *self._direct)

    @override
    def stage(self, first: int, end: int) -> nn.Module:
        names = [name for group in self.names[first:end] for name in group]
        own = {name: self.module.get_submodule(name) for name in names}
        return _StageOfBlocks(own, self._route, range(first, end))

    @override
    def layer_input(
        self, is_first: bool, received: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        given = keywords_of_a_stage(self.module, keywords)
        return (None if is_first else received, arguments, given)

    @override
    def attach(self, device: torch.device) -> None:
        super().attach(device)
        self._route.attach()
        around = accumulate(self._path.split(".")[:-1], dotted)
        self._checks = [
            self.module.get_submodule(name).register_forward_pre_hook(
                _check_inner_call, with_kwargs=True
            )
            for name in around
        ]

    @override
    def detach(self) -> None:
        for check in self._checks:
            check.remove()
        self._route.detach()
        super().detach()


class _StageOfBlocks(nn.Module):
    """A stage's part of the model, with the names of the model."""

    def __init__(self, own: Mapping[str, nn.Module], route: BlockRoute, span: range) -> None:
        super().__init__()
        self._route = route
        self._span = span
        for name, module in own.items():
            holder: nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if step not in holder._modules:
                    holder.add_module(step, nn.Module())
                holder = holder.get_submodule(step)
            holder.add_module(last, module)

    def forward(self, given: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> Any:
        received, arguments, keywords = given
        return self._route.run(self._span, received, arguments, keywords)
