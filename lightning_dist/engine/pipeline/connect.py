"""Open the channels of all pipelines of a mesh.

A pipeline has one gloo communicator each for activations, gradients and results, and two more, up
and down, if ranks hold the same parameter. Two ranks have one channel per communicator and
direction. Stages on one rank exchange tensors in its memory. Results go from the last stage's rank
straight to the others, so that a rank can have a batch's results before the batch's gradients come.

Tensors may travel point to point on another backend, NCCL for example. Then there is one more
communicator for each two neighbouring stages and direction, and gloo carries the schemas only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_dist.engine.comms.channel import MemoryChannel, Receiver, Sender
from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.p2p_channel import P2PReceiver, P2PSender, connect_ends
from lightning_dist.engine.pipeline.links import Links, PeerLinks

_Line = tuple[int, int]

# A receive is posted all the time, also while nothing is sent for hours. A thread that waits for a
# message has its own time limit.
_NEVER = timedelta(days=365)


@dataclass(frozen=True, slots=True)
class Channels:
    """All channels of one rank.

    Attributes:
        links: Channels to the neighbours.
        results_out: Channels from the last stage's rank to each other rank; empty elsewhere.
        results_in: Channel from the last stage's rank; None on that rank.
        groups: The communicators, until they are closed.
        ties: Channels to ranks that hold the same parameters.
    """

    links: Links
    results_out: tuple[Sender, ...]
    results_in: Receiver | None
    groups: list[dist.ProcessGroup]
    ties: PeerLinks

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in each waiting or later receive.

        Args:
            error: What to raise.
        """
        self.links.interrupt(error)
        self.ties.interrupt(error)
        if self.results_in is not None:
            self.results_in.interrupt(error)

    def close(self, *, failed: bool = False) -> None:
        """Closes all channels. Collective: every rank of the pipeline must call it.

        Args:
            failed: Whether the run has failed, so that messages may not have come.
        """
        for sender in (*self.results_out, *self.ties.senders()):
            sender.close(failed=failed)
        self.links.close(failed=failed)
        if self.results_in is not None:
            self.results_in.close(failed=failed)
        for receiver in self.ties.receivers():
            receiver.close(failed=failed)
        if failed:  # NCCL would wait for them
            never_destroy(self.groups)
            self.groups.clear()
        while self.groups:
            dist.destroy_process_group(self.groups.pop())


class Ends(Protocol):
    """A rank's ends of the channels of one kind: activations, or gradients."""

    def to(self, peer: int, stage: int) -> Sender:
        """Returns the end through which a stage of this rank sends to another rank's stage.

        Args:
            peer: The other rank.
            stage: The sending stage.
        """

    def of(self, peer: int, stage: int) -> Receiver:
        """Returns the end through which a stage of this rank receives from another rank's stage.

        Args:
            peer: The other rank.
            stage: The sending stage.
        """


def wire(rank_of_stage: Sequence[int], rank: int, activations: Ends, gradients: Ends) -> Links:
    """Returns the channels of a rank's stages; two stages on the rank use its memory.

    Args:
        rank_of_stage: The rank of each stage.
        rank: This rank.
        activations: This rank's ends of the channels down the pipeline.
        gradients: This rank's ends of the channels up the pipeline.
    """
    links = Links()
    for stage, (home, next_home) in enumerate(pairwise(rank_of_stage)):
        if home == next_home == rank:
            down, up = MemoryChannel(), MemoryChannel()
            links.activations_out[stage], links.activations_in[stage + 1] = down, down
            links.gradients_out[stage + 1], links.gradients_in[stage] = up, up
        elif home == rank:
            links.activations_out[stage] = activations.to(next_home, stage)
            links.gradients_in[stage] = gradients.of(next_home, stage + 1)
        elif next_home == rank:
            links.activations_in[stage + 1] = activations.of(home, stage)
            links.gradients_out[stage + 1] = gradients.to(home, stage + 1)
    return links


def connect(
    pipelines: Sequence[Sequence[int]],
    device: torch.device,
    timeout_seconds: float,
    rank_of_stage: Sequence[int] | None = None,
    holders: Collection[Sequence[int]] = (),
    p2p_backend: str | None = None,
) -> Channels:
    """Opens this rank's channels. Collective: every rank of the world must call it alike.

    Args:
        pipelines: Global ranks of each pipeline, in order.
        device: Device of received tensors.
        timeout_seconds: How long a receive waits.
        rank_of_stage: The rank of each stage in its pipeline; None puts one stage on each rank.
        holders: Ranks in a pipeline that hold the same parameter, for each such parameter.
        p2p_backend: Backend that sends the device's tensors point to point; None packs them in host
            memory, for gloo.
    """
    rank = dist.get_rank()
    pairs = _pairs(holders)
    own: list[dist.ProcessGroup] = []
    ranks: Sequence[int] = ()
    for candidates in pipelines:
        groups = [
            dist.new_group(list(candidates), backend="gloo", timeout=_NEVER)
            for _ in range(5 if pairs else 3)
        ]
        if rank in candidates:
            own, ranks = groups, candidates
    places = range(len(ranks)) if rank_of_stage is None else rank_of_stage
    homes = [ranks[place] for place in places]
    last = homes[-1]

    def receiver(group: dist.ProcessGroup, peer: int) -> Receiver:
        return DistributedReceiver(group, peer, device, timeout_seconds)

    activations, gradients, results, *of_ties = own
    down: Ends = _GroupEnds(activations, receiver)
    up: Ends = _GroupEnds(gradients, receiver)
    ties = _tie_links(ranks, pairs, of_ties, receiver)
    if p2p_backend is not None:
        lines = _Lines(pipelines, p2p_backend, device, timeout_seconds)
        neighbours = [(s, s + 1) for s, (a, b) in enumerate(pairwise(places)) if a != b]
        between = lines.open({(s, t): (places[s], places[t]) for s, t in _both_ways(neighbours)})
        down, up = _P2PEnds(down, between, lines, 1), _P2PEnds(up, between, lines, -1)
        ties = lines.over(ties, lines.open({pair: pair for pair in _both_ways(pairs)}))
        own += lines.groups
    others = [peer for peer in ranks if peer != last]
    senders = [DistributedSender(results, peer) for peer in others] if rank == last else []
    return Channels(
        links=wire(homes, rank, down, up),
        results_out=tuple(senders),
        results_in=None if rank == last else receiver(results, last),
        groups=own,
        ties=ties,
    )


def connect_in_memory(
    rank_of_stage: Sequence[int], make_channel: Callable[[], MemoryChannel] = MemoryChannel
) -> list[Links]:
    """Returns the channels of each rank, for a pipeline whose ranks are all in this process.

    Ranks that are threads must take turns: they share torch's generators, whose lock can deadlock
    with Python's.

    Args:
        rank_of_stage: The rank of each stage.
        make_channel: Creates the channel of one direction between two stages.
    """
    links = [Links() for _ in range(1 + max(rank_of_stage))]
    for stage, (home, next_home) in enumerate(pairwise(rank_of_stage)):
        down, up = make_channel(), make_channel()
        links[home].activations_out[stage] = links[next_home].activations_in[stage + 1] = down
        links[next_home].gradients_out[stage + 1] = links[home].gradients_in[stage] = up
    return links


def _both_ways(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    return [*pairs, *((second, first) for first, second in pairs)]


def _pairs(holders: Collection[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the pairs of ranks that share a parameter: its first holder with each other one."""
    pairs = {tuple(sorted((first, other))) for first, *others in holders for other in others}
    return [(low, high) for low, high in sorted(pairs)]


def _tie_links(
    ranks: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    groups: Sequence[dist.ProcessGroup],
    receiver: Callable[[dist.ProcessGroup, int], Receiver],
) -> PeerLinks:
    own = ranks.index(dist.get_rank())
    senders: dict[int, Sender] = {}
    receivers: dict[int, Receiver] = {}
    for pair in pairs:
        if own in pair:
            is_low, peer = own == pair[0], sum(pair) - own
            out, back = groups if is_low else reversed(groups)
            senders[peer] = DistributedSender(out, ranks[peer])
            receivers[peer] = receiver(back, ranks[peer])
    return PeerLinks(senders, receivers)


class _GroupEnds:
    """This rank's ends of the channels of one communicator, one for each peer and direction."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        make_receiver: Callable[[dist.ProcessGroup, int], Receiver],
    ) -> None:
        self._group = group
        self._make_receiver = make_receiver
        self._senders: dict[int, Sender] = {}
        self._receivers: dict[int, Receiver] = {}

    def to(self, peer: int, stage: int) -> Sender:
        if peer not in self._senders:
            self._senders[peer] = DistributedSender(self._group, peer)
        return self._senders[peer]

    def of(self, peer: int, stage: int) -> Receiver:
        if peer not in self._receivers:
            self._receivers[peer] = self._make_receiver(self._group, peer)
        return self._receivers[peer]


class _Lines:
    """Communicators of two ranks and one direction.

    Args:
        pipelines: Global ranks of each pipeline.
        backend: Backend of the communicators.
        device: Device of the tensors.
        timeout_seconds: How long a receive waits.

    Attributes:
        groups: The communicators of this rank.
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

    def open(self, ends: Mapping[_Line, tuple[int, int]]) -> dict[_Line, dist.ProcessGroup]:
        """Opens communicators in each pipeline, and returns this rank's.

        Collective: every rank of the world must call it alike.

        Args:
            ends: The places of the sender and the receiver in a pipeline, by any two numbers.
        """
        # The host waits for messages with a limit of its own.
        is_host = self._device.type == "cpu"
        timeout = _NEVER if is_host else timedelta(seconds=self._timeout_seconds)
        found: dict[_Line, dist.ProcessGroup] = {}
        for ranks in self._pipelines:
            for line, places in ends.items():
                sender, receiver = (ranks[place] for place in places)
                group = dist.new_group([sender, receiver], timeout=timeout, backend=self._backend)
                if dist.get_rank() in (sender, receiver):
                    # All in one order, since both ends wait for the first message.
                    connect_ends(group, sender, self._device)
                    found[line] = group
        self.groups += found.values()
        return found

    def sender(self, group: dist.ProcessGroup, peer: int, control: Sender, **how: bool) -> Sender:
        """Returns the sending end of a communicator; see :class:`.P2PSender`."""
        return P2PSender(group, peer, self._device, control, **how)

    def receiver(self, group: dist.ProcessGroup, peer: int, control: Receiver) -> Receiver:
        """Returns the receiving end of a communicator; see :class:`.P2PReceiver`."""
        return P2PReceiver(group, peer, self._device, self._timeout_seconds, control)

    def over(self, control: PeerLinks, groups: Mapping[_Line, dist.ProcessGroup]) -> PeerLinks:
        """Returns channels over communicators of this rank and its peers."""
        (ranks,) = [ranks for ranks in self._pipelines if dist.get_rank() in ranks]
        own = ranks.index(dist.get_rank())
        return PeerLinks(
            {
                peer: self.sender(groups[own, peer], ranks[peer], sender)
                for peer, sender in control.outgoing.items()
            },
            {
                peer: self.receiver(groups[peer, own], ranks[peer], receiver)
                for peer, receiver in control.incoming.items()
            },
        )


class _P2PEnds:
    """This rank's ends of the point-to-point channels of one direction.

    Args:
        control: Ends for schemas.
        groups: The communicators, by sending and receiving stage.
        lines: Creates the ends of a communicator.
        step: From a sending stage to its receiver.
    """

    def __init__(
        self,
        control: Ends,
        groups: Mapping[_Line, dist.ProcessGroup],
        lines: _Lines,
        step: int,
    ) -> None:
        self._control = control
        self._groups = groups
        self._lines = lines
        self._step = step

    def to(self, peer: int, stage: int) -> Sender:
        group = self._groups[stage, stage + self._step]
        control = self._control.to(peer, stage)
        return self._lines.sender(group, peer, control, copies_leaves=self._step > 0)

    def of(self, peer: int, stage: int) -> Receiver:
        group = self._groups[stage, stage + self._step]
        return self._lines.receiver(group, peer, self._control.of(peer, stage))
