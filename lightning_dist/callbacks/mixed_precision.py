"""Half precision under every strategy, as one callback.

Half precision is a callback, for it depends on no strategy. The callback sets the strategy's
precision plugin before anything is set up, and restores the earlier one at the end. The work of the
plugin is described in :mod:`.base.precision_plugin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.names import check_choice, check_count, check_positive
from lightning_dist.engine.precision.gradient_range import Ranges, merge
from lightning_dist.engine.precision.loss_scale import LossScale
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.strategies.base.precision_plugin import HalfPrecisionPlugin
from lightning_dist.strategies.base.rank_view import Viewable, view_of

Compute = Literal["bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision(pl.Callback):
    """Computes forward and backward in 16 bits and updates fp32 masters.

    Forward and backward run on copies of the parameters in half precision, and gradients become
    fp32. The optimizer updates the parameters, which stay fp32 and are saved in checkpoints. Under
    ``pipedream`` the stashed versions of a stage's weights are such copies.

    Args:
        compute: ``"bf16"``, or ``"fp16"``, whose loss is scaled.
        master_weights: Whether fp32 masters are kept. False makes the parameters half themselves,
            and the optimizer's state.
        keep_fp32: Parts of the names of module classes, or of dotted parameter names, that compute
            in fp32. ``"loss"`` also casts the outputs of the model to fp32.
        loss_scale: ``"dynamic"``, a number, or None for no scale; ``"auto"`` is ``"dynamic"`` for
            fp16 and None for bf16. With a scale, steps whose gradients are not finite are skipped.
        initial_scale: Initial value of a dynamic scale.
        growth_interval: Number of good steps in a row after which a dynamic scale doubles.
        log_layers_every_n_steps: Optimizer steps between two reports on each layer; None for none.

    Raises:
        ValueError: An argument is unknown or out of its range.
    """

    def __init__(
        self,
        compute: Compute = "bf16",
        master_weights: bool = True,
        keep_fp32: Sequence[str] = ("norm", "loss"),
        loss_scale: Literal["auto", "dynamic"] | float | None = "auto",
        initial_scale: float = 2.0**16,
        growth_interval: int = 2000,
        log_layers_every_n_steps: int | None = None,
    ) -> None:
        check_choice("compute", compute, get_args(Compute))
        if not _are_parts_of_names(keep_fp32):
            raise ValueError(
                f"keep_fp32={keep_fp32!r} must be a list of parts of names, none of them empty,"
                " like ['norm', 'loss']."
            )
        self._half = HalfPrecision(_DTYPES[compute], tuple(keep_fp32), master_weights)
        self._scale = _make_scale(compute, loss_scale, initial_scale, growth_interval)
        self._plugin = HalfPrecisionPlugin(self._half, self._scale)
        self._replaced: Precision | None = None
        if log_layers_every_n_steps is not None:
            check_count("log_layers_every_n_steps", log_layers_every_n_steps, instead="None")
        self._every_n_steps = log_layers_every_n_steps
        self._num_steps = 0
        self._own_ranges: Ranges = {}
        self._ranges: Ranges = {}

    @property
    def loss_scale(self) -> LossScale | None:
        """The scale and the counts of steps; None if nothing is scaled."""
        return self._scale

    @property
    def layers(self) -> Ranges:
        """The newest report by layer, the same on all ranks; empty before the first."""
        return self._ranges

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        present = trainer.strategy.precision_plugin
        if present is self._plugin:  # a run that has failed has not restored the earlier one
            return
        _check(trainer, pl_module)
        self._replaced = present
        trainer.strategy.precision_plugin = self._plugin

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._num_steps = trainer.global_step

    def _is_due(self, step: int) -> bool:
        return self._every_n_steps is not None and step % self._every_n_steps == 0

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._is_due(trainer.global_step):
            self._own_ranges = self._plugin.measure_gradients()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        if self._scale is not None:
            self._plugin.update_loss_scale()
            metrics = {
                "mixed_precision/loss_scale": self._scale.value,
                "mixed_precision/skipped_steps": float(self._scale.num_skipped),
            }
            pl_module.log_dict(metrics, batch_size=1)
        before, self._num_steps = self._num_steps, trainer.global_step
        if before != self._num_steps and self._is_due(before):
            self._report(trainer, pl_module)

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Logs all ranks' measurements, of several batches if the schedule is asynchronous."""
        own, self._own_ranges = self._own_ranges, {}
        all_ranges: list[Any] = [own]
        if isinstance(trainer.strategy, Viewable):
            all_ranges = gather_objects(own, view_of(trainer).group_of_all(""))
        self._ranges = merge(all_ranges)
        for layer, found in self._ranges.items():
            metrics = {
                f"mixed_precision/overflow_share/{layer}": found.overflow_share,
                f"mixed_precision/underflow_share/{layer}": found.underflow_share,
            }
            module.log_dict(metrics, batch_size=1)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._plugin.update_loss_scale()  # the pipeline has been drained

    # --- checkpoints -------------------------------------------------------------------------

    # Here rather than in the plugin, which is not the strategy's any more when a run is over.

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._scale is None:
            return {}
        self._plugin.update_loss_scale()
        return self._scale.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._scale is not None and state_dict:
            self._plugin.update_loss_scale()  # steps before it, such as a learning rate finder's
            self._scale.load_state_dict(state_dict)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._replaced is not None:
            trainer.strategy.precision_plugin = self._replaced
            self._replaced = None


def _are_parts_of_names(given: object) -> bool:
    if isinstance(given, str) or not isinstance(given, Sequence):
        return False
    return all(isinstance(part, str) and part for part in given)


def _make_scale(
    compute: Compute,
    asked: Literal["auto", "dynamic"] | float | None,
    initial_scale: float,
    growth_interval: int,
) -> LossScale | None:
    check_positive("initial_scale", initial_scale)
    check_count("growth_interval", growth_interval)
    if isinstance(asked, str) and asked not in ("auto", "dynamic"):
        raise ValueError(
            f"loss_scale={asked!r} is unknown; use 'auto', 'dynamic', a number or None."
        )
    if compute == "bf16":
        if asked not in ("auto", None):
            raise ValueError(
                f"loss_scale={asked!r} does not go with compute='bf16', which has the range of fp32"
                " and loses no small gradients. Leave it out, or use compute='fp16'."
            )
        return None
    if asked is None:
        return None
    if isinstance(asked, str):
        return LossScale(initial_scale, growth_interval=growth_interval)
    check_positive("loss_scale", asked)
    return LossScale(float(asked), is_dynamic=False)


def _check(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Checks that no other setting chooses the precision, and that steps are Lightning's."""
    strategy = trainer.strategy
    present = strategy.precision_plugin
    if type(present) is not Precision:
        raise ValueError(
            f"Both MixedPrecision and precision={present.precision!r} ({type(present).__name__})"
            " say what to compute in. Leave out Trainer(precision=...), or the callback."
        )
    known = Viewable | SingleDeviceStrategy | DDPStrategy
    if not isinstance(strategy, known):
        raise ValueError(
            f"MixedPrecision does not know how {type(strategy).__name__} holds parameters. Use a"
            " strategy of this package, a single device or Lightning's DDPStrategy; or leave the"
            " callback out."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "MixedPrecision casts the weights once for each step, and with manual optimization they"
            " change in the middle of one. Use automatic optimization, or"
            " Trainer(precision='bf16-mixed')."
        )
