"""What strategies share whose ranks read different data and meet in each step.

Random numbers that differ between the ranks and depend on the batch alone; BatchNorm over all ranks
on a CPU too; evaluations that end together; whoever looks at the weights (validation, a checkpoint,
the end of training) finds them the same everywhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_dist.strategies import data_parallel_checks as checks
from lightning_dist.strategies import lightning_private
from lightning_dist.strategies.bracket import bracket_callbacks
from lightning_dist.strategies.drain_hook import drain_before_validation
from lightning_dist.strategies.evaluation_stop import stop_evaluations_together
from lightning_dist.strategies.layout_free import LayoutFreeCheckpoints
from lightning_dist.strategies.replicas import broadcast_state
from lightning_dist.strategies.synced_batch_norm import SyncedBatchNorm


class DataParallelStrategy(LayoutFreeCheckpoints):
    """Base of strategies with data axes only; see the module's docstring."""

    _undo: tuple[Callable[[], None], ...] = ()

    @abstractmethod
    def drain(self) -> None:
        """Makes all ranks' weights and buffers those to look at; all ranks must call it.

        Validation, checkpoints and the end of training do so by themselves.
        """

    def share_buffers(self) -> None:
        """Gives all ranks the first one's buffers: running statistics; all ranks must call it."""
        broadcast_state(self.module.buffers(), self.group(*self.mesh.sizes))

    def synchronise_layers(self) -> None:
        """Makes BatchNorm see all ranks where the Trainer was asked for ``sync_batchnorm``."""
        if self.root_device.type == "cpu":
            lightning_private.replace_torch_layer_sync(self, SyncedBatchNorm(self.data_group))
        lightning_private.apply_layer_sync(self, self.module)

    def summarised_module(self) -> AbstractContextManager[None]:
        """Gives what is entered while the callbacks' ``on_fit_start`` look at the module."""
        return nullcontext()

    def hook_into(self, trainer: pl.Trainer) -> None:
        """Puts this strategy where Lightning does not call it, until the session is closed.

        Args:
            trainer: Set up to fit, or to evaluate.
        """
        self.guard.connect_signals(trainer, partial(self.seed_data_rank, reading=True))
        if trainer.state.fn != TrainerFn.FITTING:
            everyone = self.group(*self.mesh.sizes)
            self._undo += (stop_evaluations_together(trainer, self.guard, everyone),)
            return
        self._undo += (
            drain_before_validation(self.module, self.drain),
            bracket_callbacks(
                trainer,
                show_whole_model=self.summarised_module,
                on_train_epoch_end=lambda: None,
                on_train_end=self.drain,
                on_exception=self.on_exception,
                on_train_epoch_start=partial(self.seed_data_rank, reading=True),
            ),
        )

    @override
    def close_session(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = ()

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.drain()
        return super().lightning_module_state_dict()

    @override
    def model_to_device(self) -> None:
        self.module.to(self.root_device)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self.module.trainer.training:
            self.seed_data_rank(reading=True)  # its workers take their seeds next
        return dataloader

    @override
    def on_train_start(self) -> None:
        checks.check_lengths(self.module.trainer, self.group(*self.mesh.sizes))
