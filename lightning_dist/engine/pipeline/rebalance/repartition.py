"""Cut a pipeline anew while it trains: agree, exchange layers, go on.

What stays open is as large as can be. Channels, the recorder, the log, the optimizer and whatever
holds it outlive the change; only the stages are made anew, on the layers that are here then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_dist.engine.pipeline.connect import connect_moves
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.relocation import MoveLinks, Relocation
from lightning_dist.engine.planning.partition import Move
from lightning_dist.engine.splitting.find_layers import choose_partition, refuse_ties
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.split import PipelineSplit
from lightning_dist.engine.splitting.ties import find_ties

_COPIES = (
    "Each stage has a copy then, and moving layers would have to join copies, or make new ones."
    " Restart from a checkpoint with `partition=`."
)
_ONE_BY_ONE = (
    "Layers move one by one, and these would have to stay together or be copied. Use"
    " StageBalancer(action='report') and `partition=` with the layers per stage."
)


@dataclass(frozen=True, slots=True)
class Repartition:
    """A change of the cut.

    Attributes:
        layers_per_stage: The cut from now on.
        moves: The layers that have changed their rank, all of the pipeline.
        seconds: What it took on this rank, with the drain.
    """

    layers_per_stage: tuple[int, ...]
    moves: tuple[Move, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        """Says what has moved, on one line."""
        routes = ", ".join(f"{m.layer_index} (rank {m.source} to {m.target})" for m in self.moves)
        return (
            f"The pipeline has {list(self.layers_per_stage)} layers per stage now. Moved in"
            f" {self.seconds:.2f} s: {routes or 'none between ranks'}."
        )


def agree_on_cut(
    split: PipelineSplit, wanted: Sequence[int], everyone: dist.ProcessGroup
) -> tuple[int, ...]:
    """Checks a cut, on all ranks alike.

    Args:
        split: As it is.
        wanted: Layers per stage.
        everyone: A gloo group of all ranks, each of which must call it.

    Raises:
        ValueError: It does not fit, ranks want different ones, or stages share parameters.
    """
    cuts: list[Any] = [None] * dist.get_world_size(everyone)
    dist.all_gather_object(cuts, [int(count) for count in wanted], group=everyone)
    others = [(rank, cut) for rank, cut in enumerate(cuts) if cut != cuts[0]]
    if others:
        rank, cut = others[0]
        raise ValueError(
            f"Rank 0 asks for the cut {cuts[0]}, and rank {rank} for {cut}. All ranks must ask for"
            " the same: decide by what is known everywhere, or on one rank and broadcast."
        )
    after = choose_partition(split.layers, cuts[0], len(split.layers_per_stage))
    for ties in (split.ties, find_ties(split.layers, after)):
        refuse_ties(ties, _COPIES)
    return after


def refuse_shared_parameters(layers: Layers) -> None:
    """Refuses layers that would have to stay together, or to be copied.

    Args:
        layers: Of the pipelined module.

    Raises:
        ValueError: Two of them share a parameter.
    """
    refuse_ties(find_ties(layers, (1,) * len(layers)), _ONE_BY_ONE)


class LayerExchange:
    """Sends layers from rank to rank of a pipeline.

    Args:
        ranks: Global ranks of the pipeline, in order.
        groups: Two gloo groups of them, for nothing else.
        device: Where this rank computes.
        timeout_seconds: How long a rank waits for another.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._ranks = ranks
        self._groups = groups
        self._device = device
        self._timeout_seconds = timeout_seconds
        self._links = MoveLinks()
        self._interruption: BaseException | None = None

    def run(
        self,
        pipeline: Pipeline,
        split: PipelineSplit,
        after: tuple[int, ...],
        optimizers: Sequence[Optimizer],
        *,
        with_gradients: bool,
        on_moved: Callable[[], None],
    ) -> tuple[Move, ...]:
        """Moves the layers of a pipeline that is empty.

        Args:
            pipeline: This rank's stages.
            split: As the module is cut now.
            after: Layers per stage.
            optimizers: Of this rank's parameters; their groups are the caller's to put right.
            with_gradients: Whether ``p.grad`` waits for an update.
            on_moved: Called when the layers are here, before stages are made of them.

        Returns:
            What has moved on all ranks of the pipeline.
        """
        relocation = Relocation(
            split.layers,
            split.layers_per_stage,
            after,
            rank_of_stage=pipeline.shape.rank_of_stage,
            rank=pipeline.shape.rank,
            device=self._device,
        )
        self._links = connect_moves(
            relocation, self._ranks, self._groups, self._device, self._timeout_seconds
        )
        if self._interruption is not None:  # while they were made, or before
            self._links.interrupt(self._interruption)
        with pipeline.detached():
            relocation.run(self._links, optimizers, with_gradients=with_gradients)
            pipeline.stages.repartition(after)
            on_moved()
        self._links.close()
        self._links = MoveLinks()
        return relocation.moves

    def interrupt(self, error: BaseException) -> None:
        """Wakes this rank where it waits for a layer, or when it comes to.

        Args:
            error: What to raise there.
        """
        self._interruption = error
        self._links.interrupt(error)
