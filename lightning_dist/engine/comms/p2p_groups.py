"""The communicators of a pipeline's point-to-point channels: two ranks and one direction each.

A communicator runs its operations in order. Two stages send to each other in both directions, and
two ranks may have several stages, whose messages come in another order than they were sent. So
each use has a communicator of its own, and no order of calls can deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.comms.p2p_channel import P2PReceiver, P2PSender, connect_ends

GroupKey = tuple[int, int]
"""Any two numbers that name a communicator: the sending stage and the receiving one, say."""

# The host waits for messages with a limit of its own.
_NEVER = timedelta(days=365)


class P2PGroups:
    """Communicators of two ranks and one direction.

    Args:
        pipelines: Global ranks of each pipeline.
        backend: Backend of the communicators.
        device: Device of the tensors.
        timeout_seconds: How long a receive waits.

    Attributes:
        groups: The communicators of this rank.
        ranks: Global ranks of this rank's pipeline.
        place: This rank's index in its pipeline.
    """

    def __init__(
        self,
        pipelines: Sequence[Sequence[int]],
        backend: str,
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        self._pipelines = pipelines
        self._backend = backend
        self._device = device
        self._timeout_seconds = timeout_seconds
        self.groups: list[dist.ProcessGroup] = []
        (self.ranks,) = [ranks for ranks in pipelines if dist.get_rank() in ranks]
        self.place = self.ranks.index(dist.get_rank())

    def open(self, ends: Mapping[GroupKey, tuple[int, int]]) -> dict[GroupKey, dist.ProcessGroup]:
        """Opens communicators in each pipeline, and returns this rank's.

        Collective: every rank of the world must call it alike.

        Args:
            ends: The places of the sender and the receiver in a pipeline, by any two numbers.
        """
        is_host = self._device.type == "cpu"
        timeout = _NEVER if is_host else timedelta(seconds=self._timeout_seconds)
        found: dict[GroupKey, dist.ProcessGroup] = {}
        for ranks in self._pipelines:
            for key, places in ends.items():
                sender, receiver = (ranks[place] for place in places)
                group = dist.new_group([sender, receiver], timeout=timeout, backend=self._backend)
                if dist.get_rank() in (sender, receiver):
                    # All in one order, since both ends wait for the first message.
                    connect_ends(group, sender, self._device)
                    found[key] = group
        self.groups += found.values()
        return found

    def sender(self, group: dist.ProcessGroup, peer: int, control: Sender, **how: bool) -> Sender:
        """Returns the sending end of a communicator; see :class:`.P2PSender`."""
        return P2PSender(group, peer, self._device, control, **how)

    def receiver(self, group: dist.ProcessGroup, peer: int, control: Receiver) -> Receiver:
        """Returns the receiving end of a communicator; see :class:`.P2PReceiver`."""
        return P2PReceiver(group, peer, self._device, self._timeout_seconds, control)
