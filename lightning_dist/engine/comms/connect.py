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
from datetime import timedelta
from functools import cache
from itertools import pairwise
from threading import Thread

import torch
import torch.distributed as dist

from lightning_dist.engine.common.device_group import NEVER
from lightning_dist.engine.comms.channel import MemoryChannel, Receiver, Sender
from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.links import ChannelEnds, Links
from lightning_dist.engine.comms.p2p_channel import GroupKey, P2PReceiver, P2PSender, connect_ends


@dataclass(frozen=True)
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
    ties: ChannelEnds[int]

    @property
    def _ends(self) -> ChannelEnds[int]:
        results = () if self.results_in is None else (self.results_in,)
        senders = (*self.results_out, *self.ties.outgoing.values(), *self.links.outgoing.values())
        receivers = (*self.links.incoming.values(), *results, *self.ties.incoming.values())
        return ChannelEnds(dict(enumerate(senders)), dict(enumerate(receivers)))

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in each waiting or later receive."""
        self._ends.interrupt(error)

    def close(self, *, failed: bool = False) -> None:
        """Closes the channels, when all has arrived unless the run has failed. Collective."""
        self._ends.close(failed=failed)
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
    outgoing: dict[GroupKey, Sender] = {}
    incoming: dict[GroupKey, Receiver] = {}
    for stage, homes in enumerate(pairwise(rank_of_stage)):
        down = (stage, stage + 1)
        for ends, (source, target) in ((down, homes), (down[::-1], homes[::-1])):
            if source == target == rank:
                outgoing[ends] = incoming[ends] = MemoryChannel()
            elif source == rank:
                outgoing[ends] = sender(*ends)
            elif target == rank:
                incoming[ends] = receiver(*ends)
    return ChannelEnds(outgoing, incoming)


def connect(
    pipelines: Sequence[Sequence[int]],
    device: torch.device,
    timeout_seconds: float,
    rank_of_stage: Sequence[int] | None = None,
    holders: Collection[Sequence[int]] = (),
    p2p_backend: str | None = None,
) -> Channels:
    """Opens this rank's channels. Collective: every rank of the world must call it alike.

    Close them at the end: a process that exits while its threads wait in them may be aborted.

    Args:
        pipelines: Global ranks of each pipeline, in order.
        device: Device of received tensors.
        timeout_seconds: How long a receive waits.
        rank_of_stage: The rank of each stage in its pipeline; None puts one stage on each rank.
        holders: Ranks in a pipeline that hold the same parameter, for each such parameter.
        p2p_backend: Backend that sends the device's tensors point to point; None packs them in host
            memory, for gloo.

    Raises:
        ValueError: A rank of the world is in no pipeline.
    """
    without = {*range(dist.get_world_size())}.difference(*pipelines)
    if without:
        raise ValueError(
            f"pipelines={[[*ranks] for ranks in pipelines]} leave out the ranks {sorted(without)}"
            " of the world. Give each rank a place, or start as many as the pipelines have."
        )
    pairs = _pairs(holders)
    ranks, groups = _open_groups(pipelines, 5 if pairs else 3)
    places = range(len(ranks)) if rank_of_stage is None else rank_of_stage
    opener = _Opener(ranks, device, timeout_seconds, pipelines, p2p_backend)

    activations, gradients, of_results, *of_ties = groups
    crossings = [(s, s + 1) for s, (a, b) in enumerate(pairwise(places)) if a != b]
    down = {(s, t): (places[s], places[t]) for s, t in crossings}
    up = {(t, s): (places[t], places[s]) for s, t in crossings}
    from_last = {(places[-1], p): (places[-1], p) for p in range(len(ranks)) if p != places[-1]}
    stages_down = opener.open(activations, down, copies_leaves=True)
    stages_up = opener.open(gradients, up)
    results = opener.open(of_results, from_last, copies_leaves=True)
    directions = (pairs, [(t, s) for s, t in pairs])
    ties = [
        opener.open(group, {pair: pair for pair in directed})
        for group, directed in zip(of_ties, directions, strict=False)
    ]
    senders = {**stages_down.outgoing, **stages_up.outgoing}
    receivers = {**stages_down.incoming, **stages_up.incoming}
    links = wire(
        [ranks[place] for place in places],
        dist.get_rank(),
        lambda source, target: senders[source, target],
        lambda source, target: receivers[source, target],
    )
    return Channels(
        links=links,
        results_out=tuple(results.outgoing.values()),
        results_in=next(iter(results.incoming.values()), None),
        groups=groups,
        p2p_groups=opener.p2p_groups,
        ties=ChannelEnds(
            {peer: end for ends in ties for (_, peer), end in ends.outgoing.items()},
            {peer: end for ends in ties for (peer, _), end in ends.incoming.items()},
        ),
    )


def _open_groups(
    pipelines: Sequence[Sequence[int]], count: int
) -> tuple[Sequence[int], list[dist.ProcessGroup]]:
    """Opens gloo groups of each pipeline; returns the ranks of this rank's one, and its groups."""
    found: tuple[Sequence[int], list[dist.ProcessGroup]] = (), []
    for ranks in pipelines:
        groups = [
            # A receive is posted all the time, also while nothing is sent for hours.
            dist.new_group(list(ranks), backend="gloo", timeout=NEVER)
            for _ in range(count)
        ]
        if dist.get_rank() in ranks:
            found = ranks, groups
    return found


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
class _Opener:
    """Opens this rank's channels to and from other ranks of its pipeline."""

    ranks: Sequence[int]  # of the pipeline
    device: torch.device
    timeout_seconds: float
    pipelines: Sequence[Sequence[int]]
    p2p_backend: str | None  # None packs tensors for the gloo groups
    p2p_groups: list[dist.ProcessGroup] = field(default_factory=list)  # those of this rank

    def open(
        self,
        group: dist.ProcessGroup,
        places: Mapping[GroupKey, tuple[int, int]],
        *,
        copies_leaves: bool = False,
    ) -> ChannelEnds[GroupKey]:
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

        own = self.ranks.index(dist.get_rank())
        outgoing: dict[GroupKey, Sender] = {}
        incoming: dict[GroupKey, Receiver] = {}
        p2p = {} if self.p2p_backend is None else self._open_p2p(places)
        for key, (source, target) in places.items():
            if source == own:
                peer = self.ranks[target]
                out = sender(peer)
                if key in p2p:
                    out = P2PSender(p2p[key], peer, self.device, out, copies_leaves=copies_leaves)
                outgoing[key] = out
            elif target == own:
                peer = self.ranks[source]
                into = receiver(peer)
                if key in p2p:
                    into = P2PReceiver(p2p[key], peer, self.device, self.timeout_seconds, into)
                incoming[key] = into
        return ChannelEnds(outgoing, incoming)

    def _open_p2p(
        self, places: Mapping[GroupKey, tuple[int, int]]
    ) -> dict[GroupKey, dist.ProcessGroup]:
        """Opens communicators of two ranks and one direction, of which it returns this rank's."""
        is_host = self.device.type == "cpu"
        timeout = NEVER if is_host else timedelta(seconds=self.timeout_seconds)
        found: dict[GroupKey, dist.ProcessGroup] = {}
        for ranks in self.pipelines:
            for key, ends in places.items():
                sender, receiver = (ranks[place] for place in ends)
                group = dist.new_group([sender, receiver], timeout, self.p2p_backend)
                if dist.get_rank() in (sender, receiver):
                    # All in one order, since both ends wait for the first message.
                    connect_ends(group, sender, self.device)
                    found[key] = group
        self.p2p_groups.extend(found.values())
        return found
