"""Hogwild: the workers of one host write to the same weights, without locks.

Each rank runs Lightning's loops on its share of the data, and its own optimizer steps on weights in
shared memory. No gradient and no weight is sent. A step may read weights that another one is
writing, and may undo what another one has written meanwhile. That is rare where gradients are
sparse. Ranks meet at validation, checkpoints and ends of epochs, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import check_count
from lightning_dist.engine.common.table import format_count
from lightning_dist.engine.data_parallel.shared_weights import SharedWeights
from lightning_dist.strategies.base.distributed import RunArguments
from lightning_dist.strategies.base.rank_view import RankView
from lightning_dist.strategies.mesh_runtime.data_parallel import DataParallelStrategy


class HogwildStrategy(DataParallelStrategy):
    """Trains workers of one host on shared weights, without locks; on CPUs.

    Gradients are clipped by the rank that has them. Each rank keeps its own optimizer state; a
    checkpoint has the first rank's.

    Args:
        max_lead: Batches that a rank may be ahead of the slowest one. A stop that a rank asks for
            comes as many batches later.
        arguments: Those of all strategies, see :class:`.RunArguments`.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(self, max_lead: int = 64, **arguments: Unpack[RunArguments]) -> None:
        super().__init__(**arguments)
        check_count("max_lead", max_lead)
        self._max_lead = max_lead
        self._shared: SharedWeights | None = None

    @override
    def mesh_shape(self, world_size: int) -> MeshShape:
        if self.num_nodes > 1:
            raise ValueError(
                f"num_nodes={self.num_nodes}: HogwildStrategy needs all ranks on one host. Pass"
                " num_nodes=1, or use ParameterServerStrategy(mode='async')."
            )
        if self.root_device.type != "cpu":
            raise ValueError(
                f"HogwildStrategy shares memory of the host, and the device is"
                f" {self.root_device}. Pass accelerator='cpu', or use DDPStrategy."
            )
        return MeshShape(dp_replicate=world_size)

    @override
    def view(self) -> RankView:
        return replace(super().view(), local_steps=self._max_lead)

    @property
    @override
    def stop_lag(self) -> int:
        return self._max_lead

    @override
    def check_run(self, trainer: pl.Trainer) -> None:
        super().check_run(trainer)
        if self.is_fitting:
            self.check_steps_apart(trainer)

    @override
    def print_summary(self) -> None:
        number = sum(parameter.numel() for parameter in self.module.parameters())
        rank_zero_info(
            f"Hogwild: {self.world_size} workers share {format_count(number)} parameters, without"
            " locks."
        )
        self.explain_batch_statistics()

    @override
    def open_session(self, trainer: pl.Trainer) -> None:
        if self.is_fitting:
            self._shared = SharedWeights(list(self.module.parameters()), self.world_group)

    @override
    def close_session(self) -> None:
        super().close_session()
        if self._shared is not None and self._shared.is_shared:
            self._shared.part(failed=True)  # a stop, or a failure
        self._shared = None

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._shared is not None and not self._shared.is_shared:
            self._shared.share()

    @override
    def drain(self) -> None:
        """Waits for all ranks' updates, and broadcasts buffers. Collective.

        Validation, checkpoints, and the ends of epochs and of training call it by themselves.
        """
        if self._shared is None:
            return
        self.check_peers()
        if self.is_running and self._shared.is_shared:
            self._shared.part()
            self.share_buffers()

    @override
    def load_extra_state(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_extra_state(checkpoint)
        self.drain()  # the learning rate finder loads while training; the next batch begins anew

    @override
    def end_epoch(self) -> None:
        super().end_epoch()
        self.drain()
