"""The agreement of all ranks on another partition, before layers move, and what has moved.

A partition that does not fit is refused on all ranks before any rank sends a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from lightning_dist.engine.common.device_group import gather_objects
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
    """A change of the partition.

    Attributes:
        layers_per_stage: The partition from now on.
        moves: All layers of the pipeline that have changed their rank.
        seconds: Duration of the change on this rank, with the drain.
    """

    layers_per_stage: tuple[int, ...]
    moves: tuple[Move, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        """Returns a line that lists the moves."""
        runs: list[list[Move]] = []
        for move in self.moves:
            if runs and runs[-1][-1] == replace(move, layer_index=move.layer_index - 1):
                runs[-1].append(move)
            else:
                runs.append([move])
        routes = ", ".join(
            f"{run[0].layer_index}{f' to {run[-1].layer_index}' * (len(run) > 1)}"
            f" (rank {run[0].source} to {run[0].target})"
            for run in runs
        )
        return (
            f"The pipeline has {list(self.layers_per_stage)} layers per stage now. Moved in"
            f" {self.seconds:.2f} s: {routes or 'none between ranks'}."
        )


def agree_on_cut(
    split: PipelineSplit, wanted: Sequence[int], world: dist.ProcessGroup
) -> tuple[int, ...]:
    """Checks that all ranks want the same possible partition. Collective: every rank must call it.

    Raises:
        ValueError: The partition does not fit, ranks want different ones, or stages share
            parameters.
    """
    cuts = gather_objects([int(count) for count in wanted], world)
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
    """Refuses layers that share a parameter, since layers move one by one.

    Raises:
        ValueError: Two layers share a parameter.
    """
    refuse_ties(find_ties(layers, (1,) * len(layers)), _ONE_BY_ONE)
