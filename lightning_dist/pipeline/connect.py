"""Open the channels of all pipelines of a mesh.

A pipeline of ``num_stages`` ranks gets one communicator for activations, one for gradients and one
for results, each used in one direction only. Results go from the last stage straight to each other
one: they are small, and a stage can have those of a batch before the batch's gradients come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_dist.pipeline.channel import Receiver, Sender
from lightning_dist.pipeline.runtime import Links
from lightning_dist.pipeline.transport import DistributedReceiver, DistributedSender

# A receive is posted all the time, also while nothing is sent for hours. Who waits for a message
# has a time limit of their own.
_NEVER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Channels:
    """All channels of one stage.

    Attributes:
        links: To the neighbours.
        results_out: From the last stage to each other one.
        results_in: From the last stage; None on itself.
        groups: The communicators.
    """

    links: Links
    results_out: tuple[Sender, ...]
    results_in: Receiver | None
    groups: tuple[dist.ProcessGroup, ...]

    def interrupt(self, error: BaseException) -> None:
        """Makes each waiting or later receive raise.

        Args:
            error: What to raise.
        """
        self.links.interrupt(error)
        if self.results_in is not None:
            self.results_in.interrupt(error)

    def close(self) -> None:
        """Ends all channels; each stage must call it."""
        for sender in self.results_out:
            sender.close()
        self.links.close()
        if self.results_in is not None:
            self.results_in.close()
        for group in self.groups:
            dist.destroy_process_group(group)


def connect(
    pipelines: Sequence[Sequence[int]], device: torch.device, timeout_seconds: float
) -> Channels:
    """Opens this rank's channels; each rank of the world must call it alike.

    Args:
        pipelines: Global ranks of each pipeline's stages, in order.
        device: Where received tensors shall be.
        timeout_seconds: How long a receive waits.
    """
    rank = dist.get_rank()
    own: list[dist.ProcessGroup] = []
    stages: Sequence[int] = ()
    for ranks in pipelines:
        groups = [dist.new_group(list(ranks), backend="gloo", timeout=_NEVER) for _ in range(3)]
        if rank in ranks:
            own, stages = groups, ranks
    activations, gradients, results = own
    place = list(stages).index(rank)
    before = stages[place - 1] if place > 0 else None
    after = stages[place + 1] if place + 1 < len(stages) else None
    last = stages[-1]

    def receiver(group: dist.ProcessGroup, peer: int | None) -> Receiver | None:
        if peer is None:
            return None
        return DistributedReceiver(group, peer, device, timeout_seconds)

    def sender(group: dist.ProcessGroup, peer: int | None) -> Sender | None:
        return None if peer is None else DistributedSender(group, peer)

    links = Links(
        activations_in=receiver(activations, before),
        activations_out=sender(activations, after),
        gradients_in=receiver(gradients, after),
        gradients_out=sender(gradients, before),
    )
    listeners = stages[:-1] if rank == last else ()
    return Channels(
        links,
        tuple(DistributedSender(results, peer) for peer in listeners),
        None if rank == last else DistributedReceiver(results, last, device, timeout_seconds),
        tuple(own),
    )
