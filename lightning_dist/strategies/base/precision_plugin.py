"""Half precision with masters, as a precision plugin of Lightning's.

A precision plugin runs the context of each step, the backward, clipping and the optimizer's step,
under Lightning's strategies and this package's alike. So the scheme has one place, and a strategy
only takes over some parts. FSDP2 casts the parameters that it gathers. A pipeline makes versions of
its stage's weights. How ranks vote on skipping a step depends on when they update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_dist.engine.precision.casts import Copies, HalfCasts, half_copies, swapped_parameters
from lightning_dist.engine.precision.gradient_range import Ranges, measure
from lightning_dist.engine.precision.loss_scale import LossScale
from lightning_dist.engine.precision.overflow import Overflow
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.sharding.fully_shard import is_left_whole
from lightning_dist.engine.splitting.cut import remote_layers, whole
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.placed_parameters import placed_in
from lightning_dist.engine.stashing.half_versions import HalfWeights
from lightning_dist.strategies.base import lightning_internals


class HalfPrecisionPlugin(Precision):
    """Runs steps in half precision and updates masters.

    Args:
        half: The parts of a model that compute in half precision.
        loss_scale: The loss scale of fp16; None scales nothing and skips no step.

    Attributes:
        overflow: The vote on skipping a step.
    """

    def __init__(self, half: HalfPrecision, loss_scale: LossScale | None = None) -> None:
        self.half = half
        self.loss_scale = loss_scale
        self.overflow: Overflow = Overflow()
        self._shards_cast = False
        self._stages: Layers | None = None
        self._divides = True
        self._module: nn.Module | None = None
        self._casts: HalfCasts | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._own: frozenset[nn.Parameter] = frozenset()
        self._cast_here: tuple[nn.Parameter, ...] = ()
        self._copies: Copies = {}

    # --- settings of a strategy --------------------------------------------------------------

    def leave_to_shards(self) -> None:
        """Leaves the cast to the sharding, which gathers parameters."""
        self._shards_cast = True
        self._find_cast_here()

    def leave_to_stages(self, layers: Layers, *, is_in_graph: bool) -> HalfWeights | None:
        """Leaves the cast, and the division by the loss scale, to a pipeline.

        Returns:
            The casts for the pipeline; None if parameters are half already, or gathered in half.
        """
        self._divides = False
        if not self.half.master_weights or self._shards_cast:
            return None
        self._stages = layers
        self._find_cast_here()
        return HalfWeights(lambda p: self.half.dtype if p in self._own else p.dtype, is_in_graph)

    def scale_of_next_batch(self) -> float:
        """Returns the factor of the next batch's loss, which is the same on all ranks."""
        self.update_loss_scale()
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def measure_gradients(self) -> Ranges:
        """Counts this rank's gradients outside of half precision's range, by layer."""
        found = {n: p.grad for n, p in self._parameters.items() if p.grad is not None}
        scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        return measure(found, self.half.dtype, scale)

    def update_loss_scale(self) -> None:
        """Updates the loss scale by the outcomes of the steps that are known so far."""
        if self.loss_scale is not None:
            for overflowed in self.overflow.outcomes():
                self.loss_scale.end_step(overflowed=overflowed)

    # --- the model ---------------------------------------------------------------------------

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        self._module = module
        self.half.convert(module)
        return module

    @override
    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        assert self._module is not None, "strategies convert the module first"
        if self.loss_scale is not None and any(isinstance(o, LBFGS) for o in optimizers):
            raise ValueError(
                "MixedPrecision('fp16') leaves a step out when its gradients are not finite, and"
                " LBFGS computes many in one step. Use compute='bf16', or another optimizer."
            )
        self._detach()
        with whole(self._module):  # other stages' layers too, which may come here
            self._casts = HalfCasts(self._module, self.half)
        self.find_parameters()
        return super().connect(model, optimizers, lr_schedulers)

    @override
    def teardown(self) -> None:
        self._detach()

    def find_parameters(self) -> None:
        """Finds this rank's parameters that compute in half precision, again after layers moved."""
        assert self._module is not None
        with whole(self._module):
            everywhere = self.half.half_parameters(self._module)
        ids = {id(parameter) for parameter in everywhere.values()}
        for _, _, layer in remote_layers(self._module):  # a model's forward may see their dtype
            names = (name for name, p in layer.skeleton.named_parameters() if id(p) in ids)
            layer.compute_dtypes = dict.fromkeys(names, self.half.dtype)
        for placed in placed_in(self._module):
            names = (name for name in everywhere if name in placed.names)
            placed.compute_dtypes = dict.fromkeys(names, self.half.dtype)
        own = {id(parameter) for parameter in self._module.parameters()}
        self._parameters = {name: p for name, p in everywhere.items() if id(p) in own}
        self._own = frozenset(self._parameters.values())
        self._find_cast_here()

    def _find_cast_here(self) -> None:
        """Finds the masters that neither shards nor stages cast."""
        parts = () if self._stages is None else self._stages.parts()
        elsewhere = {p for part in parts for p in part.module.parameters()}
        if self._stages is not None:
            elsewhere |= {*self._stages.placed_here()}
        masters = list(self._parameters.values()) if self.half.master_weights else []
        if self._shards_cast:
            masters = [p for p in masters if is_left_whole(p)]
        self._cast_here = tuple(p for p in masters if p not in elsewhere)

    def _detach(self) -> None:
        if self._casts is not None:
            self._casts.remove()
        for _, _, layer in () if self._module is None else remote_layers(self._module):
            layer.compute_dtypes = {}
        for placed in () if self._module is None else placed_in(self._module):
            placed.compute_dtypes = {}
        self._casts, self._stages, self._shards_cast = None, None, False
        self._parameters, self._own, self._cast_here, self._copies = {}, frozenset(), (), {}
        self._divides, self.overflow = True, Overflow()

    # --- steps -------------------------------------------------------------------------------

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        assert self._module is not None
        self._copies = half_copies(self._cast_here, self.half.dtype)
        with swapped_parameters(self._module, self._copies):
            yield

    @override
    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        if self.loss_scale is not None:
            tensor = tensor * self.scale_of_next_batch()
        return super().pre_backward(tensor, module)

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: pl.LightningModule,
        optimizer: Steppable | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        with swapped_parameters(model, self._copies):  # activations may be computed anew
            super().backward(tensor, model, optimizer, *args, **kwargs)
        self._copies = {}

    @override
    def optimizer_step(  # type: ignore[override]
        self,
        optimizer: Optimizer,
        model: pl.LightningModule,
        closure: Callable[[], Any],
        **kwargs: Any,
    ) -> Any:
        if self.loss_scale is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        result = closure()
        if result is None:
            return None  # `training_step` has asked to skip the batch
        gradients = self._divided_gradients(optimizer)
        is_left_out = self.overflow.decide(gradients)
        lightning_internals.between_backward_and_step(self, model, optimizer)
        if is_left_out:
            # Its LR scheduler would complain otherwise.
            lightning_internals.mark_optimizer_called(optimizer)
        else:
            optimizer.step(**kwargs)
        return result

    @torch.no_grad()
    def _divided_gradients(self, optimizer: Optimizer) -> list[Tensor]:
        assert self.loss_scale is not None
        groups = optimizer.param_groups
        found = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        if self._divides:
            for gradient in found:
                gradient.div_(self.loss_scale.value)
        return found


def param_dtype_of(plugin: Precision) -> torch.dtype | None:
    """Returns the dtype that sharded units compute in; None for the parameters' own dtype."""
    half = half_precision_of(plugin)
    if half is not None and half.half.master_weights:
        return half.half.dtype
    known = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    return known[plugin.precision] if isinstance(plugin, MixedPrecision) else None


def half_precision_of(precision: Precision) -> HalfPrecisionPlugin | None:
    """Returns a strategy's precision plugin if it is this package's, else None."""
    return precision if isinstance(precision, HalfPrecisionPlugin) else None
