"""Open the channels of all pipelines of a mesh.

A pipeline has one gloo communicator each for activations, gradients and results, and two more, up
and down, if ranks hold the same parameter. Two ranks have one channel per communicator and
direction. Stages on one rank exchange tensors in its memory. Results go from the last stage's rank
straight to the others, so that a rank can have a batch's results before the batch's gradients come.

Tensors may travel point to point on another backend, NCCL for example. Then there is one more
communicator for each two neighbouring stages and direction, and for each rank that gets results.
Gloo carries the schemas only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from threading import Thread
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_dist.engine.comms.channel import MemoryChannel, Receiver, Sender
from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.links import Links, PeerLinks
from lightning_dist.engine.comms.p2p_channel import GroupKey, P2PGroups

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
        groups: The gloo communicators, until they are closed.
        p2p_groups: Those that send point to point, until they are closed.
        ties: Channels to ranks that hold the same parameters.
    """

    links: Links
    results_out: tuple[Sender, ...]
    results_in: Receiver | None
    groups: list[dist.ProcessGroup]
    p2p_groups: list[dist.ProcessGroup]
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
        if failed:  # a message that never comes may be under way, for which NCCL would wait
            never_destroy(self.p2p_groups)
            self.p2p_groups.clear()
        _destroy(self.groups)
        _destroy(self.p2p_groups)


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

    def receiver(group: dist.ProcessGroup, peer: int) -> Receiver:
        return DistributedReceiver(group, peer, device, timeout_seconds)

    activations, gradients, of_results, *of_ties = own
    down: Ends = _GroupEnds(activations, receiver)
    up: Ends = _GroupEnds(gradients, receiver)
    results = _result_links(ranks, places[-1], of_results, receiver)
    ties = _tie_links(ranks, pairs, of_ties, receiver)
    p2p_groups: list[dist.ProcessGroup] = []
    if p2p_backend is not None:
        p2p = P2PGroups(pipelines, p2p_backend, device, timeout_seconds)
        neighbours = [(s, s + 1) for s, (a, b) in enumerate(pairwise(places)) if a != b]
        between = p2p.open({(s, t): (places[s], places[t]) for s, t in _both_ways(neighbours)})
        down, up = _P2PEnds(down, between, p2p, 1), _P2PEnds(up, between, p2p, -1)
        of_last = [(places[-1], place) for place in range(len(ranks)) if place != places[-1]]
        results = _over(p2p, results, of_last, copies_leaves=True)
        ties = _over(p2p, ties, _both_ways(pairs))
        p2p_groups = p2p.groups
    return Channels(
        links=wire(homes, rank, down, up),
        results_out=tuple(results.outgoing.values()),
        results_in=next(iter(results.incoming.values()), None),
        groups=own,
        p2p_groups=p2p_groups,
        ties=ties,
    )


def _destroy(groups: list[dist.ProcessGroup]) -> None:
    """Destroys groups at once: threads of gloo's look every 10 ms whether they may end."""
    threads = []
    while groups:
        dist.destroy_process_group(groups[-1])
        last_reference = [groups.pop()]
        threads.append(Thread(target=last_reference.clear))
        threads[-1].start()
    for thread in threads:
        thread.join()


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


def _result_links(
    ranks: Sequence[int],
    last: int,
    group: dist.ProcessGroup,
    receiver: Callable[[dist.ProcessGroup, int], Receiver],
) -> PeerLinks:
    if dist.get_rank() != ranks[last]:
        return PeerLinks(incoming={last: receiver(group, ranks[last])})
    others = [place for place in range(len(ranks)) if place != last]
    return PeerLinks({place: DistributedSender(group, ranks[place]) for place in others})


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


def _over(
    p2p: P2PGroups, control: PeerLinks, pairs: Sequence[GroupKey], *, copies_leaves: bool = False
) -> PeerLinks:
    """Opens communicators for pairs of places, and returns this rank's channels over them."""
    groups = p2p.open({pair: pair for pair in pairs})
    own, ranks = p2p.place, p2p.ranks
    return PeerLinks(
        {
            peer: p2p.sender(groups[own, peer], ranks[peer], sender, copies_leaves=copies_leaves)
            for peer, sender in control.outgoing.items()
        },
        {
            peer: p2p.receiver(groups[peer, own], ranks[peer], receiver)
            for peer, receiver in control.incoming.items()
        },
    )


class _P2PEnds:
    """This rank's ends of the point-to-point channels of one direction.

    Args:
        control: Ends for schemas.
        groups: The communicators, by sending and receiving stage.
        p2p: Creates the ends of a communicator.
        step: From a sending stage to its receiver.
    """

    def __init__(
        self,
        control: Ends,
        groups: Mapping[GroupKey, dist.ProcessGroup],
        p2p: P2PGroups,
        step: int,
    ) -> None:
        self._control = control
        self._groups = groups
        self._p2p = p2p
        self._step = step

    def to(self, peer: int, stage: int) -> Sender:
        group = self._groups[stage, stage + self._step]
        control = self._control.to(peer, stage)
        return self._p2p.sender(group, peer, control, copies_leaves=self._step > 0)

    def of(self, peer: int, stage: int) -> Receiver:
        group = self._groups[stage, stage + self._step]
        return self._p2p.receiver(group, peer, self._control.of(peer, stage))
