"""Repartition a pipeline while it trains: agree, exchange layers, go on.

As much as possible stays open. Channels, the recorder, the log, and the optimizer with its owner
outlive the change. Only the stages are created anew, on the layers that this rank has then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_dist.engine.common.gather import gather_objects
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.links import PeerLinks
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.relocation import Relocation
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
    split: PipelineSplit, wanted: Sequence[int], everyone: dist.ProcessGroup
) -> tuple[int, ...]:
    """Checks that all ranks want the same possible partition. Collective: every rank must call it.

    Raises:
        ValueError: The partition does not fit, ranks want different ones, or stages share
            parameters.
    """
    cuts = gather_objects([int(count) for count in wanted], everyone)
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
    """Checks that no two layers share a parameter, since layers move one by one.

    Raises:
        ValueError: Two layers share a parameter.
    """
    refuse_ties(find_ties(layers, (1,) * len(layers)), _ONE_BY_ONE)


class LayerExchange:
    """Sends layers from rank to rank of a pipeline.

    Args:
        ranks: Global ranks of the pipeline, in order.
        groups: Two gloo groups of these ranks for layers only: to later ranks, to earlier ranks.
        device: Device on which this rank computes.
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
        self._links = PeerLinks()
        self._interruption: BaseException | None = None

    def run(
        self,
        pipeline: Pipeline,
        layers: Layers,
        after: tuple[int, ...],
        optimizers: Sequence[Optimizer],
        *,
        with_gradients: bool,
        on_moved: Callable[[], None],
    ) -> tuple[Move, ...]:
        """Moves the layers of a pipeline that is empty, as :meth:`.Relocation.run`.

        ``on_moved`` is called when the layers have arrived, before the stages are created anew.

        Returns:
            The moves of all ranks of the pipeline.
        """
        relocation = Relocation(layers, pipeline.shape, after, self._device)
        self._links = self._connect(relocation)
        if self._interruption is not None:  # while the channels were opened, or before
            self._links.interrupt(self._interruption)
        with pipeline.detached():
            relocation.run(self._links, optimizers, with_gradients=with_gradients)
            pipeline.stages.repartition(after)
            on_moved()
        self._links.close()
        self._links = PeerLinks()
        return relocation.moves

    def _connect(self, relocation: Relocation) -> PeerLinks:
        """Opens this rank's channels. Collective: every rank of the pipeline must call it."""
        rank = self._ranks.index(dist.get_rank())
        later, earlier = self._groups
        outgoing = {
            peer: DistributedSender(later if peer > rank else earlier, self._ranks[peer])
            for peer in relocation.targets
        }
        incoming = {
            peer: DistributedReceiver(
                later if peer < rank else earlier,
                self._ranks[peer],
                self._device,
                self._timeout_seconds,
            )
            for peer in relocation.sources
        }
        return PeerLinks(outgoing, incoming)

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in this rank's present or next wait for a layer."""
        self._interruption = error
        self._links.interrupt(error)
