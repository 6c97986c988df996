"""An exponential moving average of the weights, kept by each rank for its own part.

Lightning's ``WeightAveraging`` copies the whole module, which no rank of a sharded or pipelined run
has. An average of shards is the shard of the average, so nothing needs to be sent. Validation
and the saved ``state_dict`` have the average. Training goes on from the latest weights, which
are saved beside it, under Lightning's name for them.

Under an asynchronous schedule a stage's update comes some batches after its batch, and the last
ones in a drain, behind the last batch. So there each stage averages at its own updates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.patch import Undo, replace_method
from lightning_dist.strategies.base.rank_view import view_of


class ShardedWeightAveraging(pl.Callback):
    """Averages the parameters over the optimizer's steps (Polyak averaging with a decay).

    The callback works under every strategy of this package and on a single device; under
    ``DDPStrategy`` with ``sync_every=1``. Buffers are not averaged: the average goes with the
    latest running statistics. Nor are parameters of integers, as of a quantised layer.

    Args:
        decay: Share of the average that is kept in an update, in [0, 1).
        every_n_steps: Optimizer steps from one update to the next.
        start_at_step: Optimizer steps before the first update, which copies the weights.

    Raises:
        ValueError: An argument is out of its range.
    """

    def __init__(
        self, decay: float = 0.999, every_n_steps: int = 1, start_at_step: int = 0
    ) -> None:
        if not 0.0 <= decay < 1.0 or every_n_steps < 1 or start_at_step < 0:
            raise ValueError(
                f"decay={decay} must be in [0, 1), every_n_steps={every_n_steps} at least 1, and"
                f" start_at_step={start_at_step} not negative."
            )
        self._decay = decay
        self._every_n_steps = every_n_steps
        self._start_at_step = start_at_step
        self._averages: dict[str, Tensor] = {}
        self._are_shown = False
        self._last_step = 0
        self._num_updates = 0
        self._own_updates: RemovableHandle | None = None  # under an asynchronous schedule
        self._undo: Undo | None = None

    @property
    def averages(self) -> dict[str, Tensor]:
        """This rank's part of the averages by parameter name, sharded as the parameters are.

        Empty before the first update. The latest weights while the module has the averages, in a
        validation and after the training.
        """
        return self._averages if self._num_updates else {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        local_steps = view_of(trainer).local_steps
        if local_steps:
            raise ValueError(
                "ShardedWeightAveraging averages what a rank holds, and under this strategy ranks"
                f" step apart, as with sync_every={local_steps + 1}, so that they would end"
                " with different averages. Let them step together (sync_every=1, mode='sync'), or"
                " leave the callback out."
            )
        self._forget()  # what an earlier run has left

    @override
    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._averages:
            self._keep_own(pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._averages:  # they are there when a checkpoint has been loaded
            self._take(pl_module)
        self._keep_own(pl_module)
        self._last_step = trainer.global_step
        # Lightning asks callbacks for no checkpoint of weights alone, but the module.
        save = partial(self._save_weights, pl_module, pl_module.on_save_checkpoint)
        self._undo = replace_method(pl_module, "on_save_checkpoint", save)
        pipeline = view_of(trainer).pipeline
        if pipeline is not None and pipeline.asynchronous:
            (optimizer,) = trainer.optimizers
            self._own_updates = optimizer.register_step_post_hook(
                lambda *_: self._end_step(pl_module, self._last_step + 1)
            )

    def _take(self, module: pl.LightningModule) -> None:
        # By all names of a tied parameter, of which a stage may have another than the first.
        named = module.named_parameters(remove_duplicate=False)
        self._averages = {name: p.detach().clone() for name, p in named}

    def _keep_own(self, module: pl.LightningModule) -> None:
        """Keeps this rank's: a checkpoint is loaded before the module is cut and on its device."""
        named = module.named_parameters()
        self._averages = {name: self._averages[name].to(p.device) for name, p in named}

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        step = trainer.global_step
        if self._own_updates is None and step > self._last_step:  # else gradients accumulate
            self._end_step(pl_module, step)

    def _end_step(self, pl_module: pl.LightningModule, step: int) -> None:
        before, self._last_step = self._last_step, step
        if self._updates_due(step) > self._updates_due(before):
            self._update(pl_module)

    def _updates_due(self, step: int) -> int:
        """Counts the updates up to a step; with several optimizers a batch has several steps."""
        return max(step - self._start_at_step, 0) // self._every_n_steps

    @torch.no_grad()
    def _update(self, module: pl.LightningModule) -> None:
        share_of_new = 1.0 - self._decay if self._num_updates else 1.0
        parameters = dict(module.named_parameters())
        if parameters.keys() != self._averages.keys():
            self._follow_moved_layers(module)
        for name, parameter in parameters.items():
            average, latest = local_part(self._averages[name]), local_part(parameter.detach())
            if average.is_floating_point() or average.is_complex():
                average.lerp_(latest, share_of_new)
            else:
                average.copy_(latest)
        self._num_updates += 1

    def _follow_moved_layers(self, module: pl.LightningModule) -> None:
        if self._num_updates:
            raise ValueError(
                "This rank has other layers than before, and the averages of those that moved are"
                " where they were. Cut the pipeline anew before `start_at_step`, or leave"
                " ShardedWeightAveraging out."
            )
        self._take(module)
        self._keep_own(module)

    @torch.no_grad()
    def _swap(self, module: pl.LightningModule) -> None:
        """Exchanges the module's values and the averages'."""
        parameters = dict(module.named_parameters())
        if self.averages and parameters.keys() != self._averages.keys():
            self._follow_moved_layers(module)
        for name, tensor in self.averages.items():
            latest, average = local_part(parameters[name].detach()), local_part(tensor)
            kept = latest.clone()
            latest.copy_(average)
            average.copy_(kept)
        self._are_shown = not self._are_shown

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap(pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap(pl_module)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if self._are_shown:  # a validation has not come to its end
            self._swap(pl_module)
        self._stop_counting()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._swap(pl_module)
        self._detach()  # checkpoints that are saved from now on have both, too

    def _forget(self) -> None:
        self._averages, self._are_shown = {}, False
        self._num_updates = 0
        self._detach()

    def _detach(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._stop_counting()

    def _stop_counting(self) -> None:
        if self._own_updates is not None:
            self._own_updates.remove()
            self._own_updates = None

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self._num_updates}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_updates = state_dict["num_updates"]

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self.averages:
            shown = checkpoint["state_dict"]
            other = {**shown, **self._by_each_name(pl_module, shown)}
            averages, latest = (shown, other) if self._are_shown else (other, shown)
            checkpoint |= {"state_dict": averages, "current_model_state": latest}

    def _save_weights(
        self,
        module: pl.LightningModule,
        own_hook: Callable[[dict[str, Any]], None],
        checkpoint: dict[str, Any],
    ) -> None:
        is_of_weights = "callbacks" not in checkpoint
        if is_of_weights and self.averages and not self._are_shown:
            shown = checkpoint["state_dict"]
            checkpoint["state_dict"] = {**shown, **self._by_each_name(module, shown)}
        own_hook(checkpoint)

    def _by_each_name(
        self, module: pl.LightningModule, saved: Mapping[str, Any]
    ) -> dict[str, Tensor]:
        """Returns what is kept here by all names that are saved; a tied parameter has several."""
        averages, first_names = self.averages, {p: n for n, p in module.named_parameters()}
        named = module.named_parameters(remove_duplicate=False)
        return {name: averages[first_names[p]] for name, p in named if name in saved}

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if "current_model_state" in checkpoint:
            self._take(pl_module)  # they were in `state_dict`
            latest = {"state_dict": checkpoint["current_model_state"]}
            trainer.strategy.load_model_state_dict(latest, strict=pl_module.strict_loading)
            return
        step = checkpoint["global_step"]
        if self.state_key in checkpoint["callbacks"] and self._updates_due(step):
            rank_zero_warn(
                f"The checkpoint of step {step} has averaged weights, and not the latest ones"
                " beside them: it was saved after `validate`, `test` or `predict`. Training goes on"
                " from the average, with a new average. Save checkpoints in `fit`, or right after"
                " it, to go on with both."
            )
