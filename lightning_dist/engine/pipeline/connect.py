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

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from threading import Thread

import torch
import torch.distributed as dist

from lightning_dist.engine.common.device_group import NEVER
from lightning_dist.engine.comms.channel import MemoryChannel, Receiver, Sender
from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.links import Links, PeerLinks
from lightning_dist.engine.comms.p2p_channel import GroupKey, P2PGroups


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
        """Raises an error in each waiting or later receive."""
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


def wire(
    rank_of_stage: Sequence[int],
    rank: int,
    sender: Callable[[int, int], Sender],
    receiver: Callable[[int, int], Receiver],
) -> Links:
    """Returns the channels of a rank's stages; two stages on the rank use its memory.

    Args:
        rank_of_stage: The rank of each stage.
        rank: This rank.
        sender: Returns this rank's end of a channel from a stage to a neighbour on another rank.
        receiver: Returns this rank's end of a channel from such a neighbour to a stage.
    """
    links = Links()
    for stage, (home, next_home) in enumerate(pairwise(rank_of_stage)):
        after = stage + 1
        if home == next_home == rank:
            down, up = MemoryChannel(), MemoryChannel()
            links.activations_out[stage], links.activations_in[after] = down, down
            links.gradients_out[after], links.gradients_in[stage] = up, up
        elif home == rank:
            links.activations_out[stage] = sender(stage, after)
            links.gradients_in[stage] = receiver(after, stage)
        elif next_home == rank:
            links.activations_in[after] = receiver(stage, after)
            links.gradients_out[after] = sender(after, stage)
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
            # A receive is posted all the time, also while nothing is sent for hours.
            dist.new_group(list(candidates), backend="gloo", timeout=NEVER)
            for _ in range(5 if pairs else 3)
        ]
        if rank in candidates:
            own, ranks = groups, candidates
    places = range(len(ranks)) if rank_of_stage is None else rank_of_stage
    p2p = None
    if p2p_backend is not None:
        p2p = P2PGroups(pipelines, p2p_backend, device, timeout_seconds)
    opener = _Opener(ranks, device, timeout_seconds, p2p)

    activations, gradients, of_results, *of_ties = own
    crossings = [(s, s + 1) for s, (a, b) in enumerate(pairwise(places)) if a != b]
    down = {(s, t): (places[s], places[t]) for s, t in crossings}
    up = {(t, s): (places[t], places[s]) for s, t in crossings}
    from_last = {(places[-1], p): (places[-1], p) for p in range(len(ranks)) if p != places[-1]}
    stages_down = opener.open(activations, down, copies_leaves=True)
    stages_up = opener.open(gradients, up)
    results = opener.open(of_results, from_last, copies_leaves=True)
    ties = _Ends()
    for group, directed in zip(of_ties, (pairs, [(t, s) for s, t in pairs]), strict=False):
        ties.add(opener.open(group, {pair: pair for pair in directed}))
    stages_down.add(stages_up)
    links = wire(
        [ranks[place] for place in places],
        rank,
        lambda source, target: stages_down.senders[source, target],
        lambda source, target: stages_down.receivers[source, target],
    )
    return Channels(
        links=links,
        results_out=tuple(results.senders.values()),
        results_in=next(iter(results.receivers.values()), None),
        groups=own,
        p2p_groups=[] if p2p is None else p2p.groups,
        ties=PeerLinks(
            {peer: sender for (_, peer), sender in ties.senders.items()},
            {peer: receiver for (peer, _), receiver in ties.receivers.items()},
        ),
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
    """
    channels = defaultdict[tuple[int, int], MemoryChannel](make_channel)

    def channel(source: int, target: int) -> MemoryChannel:
        return channels[source, target]

    ranks = range(1 + max(rank_of_stage))
    return [wire(rank_of_stage, rank, channel, channel) for rank in ranks]


def _pairs(holders: Collection[Sequence[int]]) -> list[tuple[int, int]]:
    """Returns the pairs of ranks that share a parameter: its first holder with each other one."""
    pairs = {tuple(sorted((first, other))) for first, *others in holders for other in others}
    return [(low, high) for low, high in sorted(pairs)]


@dataclass(frozen=True, slots=True)
class _Ends:
    """This rank's ends of channels, by two numbers that name the direction: stages, or places."""

    senders: dict[GroupKey, Sender] = field(default_factory=dict)
    receivers: dict[GroupKey, Receiver] = field(default_factory=dict)

    def add(self, others: _Ends) -> None:
        self.senders.update(others.senders)
        self.receivers.update(others.receivers)


@dataclass(frozen=True, slots=True)
class _Opener:
    """Opens this rank's channels to and from other ranks of its pipeline."""

    ranks: Sequence[int]  # of the pipeline
    device: torch.device
    timeout_seconds: float
    p2p: P2PGroups | None  # None packs tensors for the gloo groups

    def open(
        self,
        group: dist.ProcessGroup,
        places: Mapping[GroupKey, tuple[int, int]],
        *,
        copies_leaves: bool = False,
    ) -> _Ends:
        """Opens channels over one gloo group, in which two ranks have one for each direction.

        Args:
            group: Takes the messages, or their schemas.
            places: The places of the sender and the receiver in the pipeline, of each channel.
            copies_leaves: As for :class:`.P2PSender`.
        """

        @cache
        def sender(peer: int) -> Sender:
            return DistributedSender(group, peer)

        @cache
        def receiver(peer: int) -> Receiver:
            return DistributedReceiver(group, peer, self.device, self.timeout_seconds)

        p2p, own, ends = self.p2p, self.ranks.index(dist.get_rank()), _Ends()
        over = {} if p2p is None else p2p.open(places)
        for key, (source, target) in places.items():
            if source == own:
                peer = self.ranks[target]
                out = sender(peer)
                if p2p is not None:
                    out = p2p.sender(over[key], peer, out, copies_leaves=copies_leaves)
                ends.senders[key] = out
            elif target == own:
                peer = self.ranks[source]
                into = receiver(peer)
                if p2p is not None:
                    into = p2p.receiver(over[key], peer, into)
                ends.receivers[key] = into
        return ends
