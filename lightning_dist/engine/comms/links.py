"""The ends of channels that one rank of a pipeline has, by what they are for.

Two stages of a rank may use one channel. So all ends of a rank are interrupted and closed together,
each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.schedules.registry import PipelineShape

Key = TypeVar("Key")


@dataclass(frozen=True)
class ChannelEnds(Generic[Key]):
    """The ends of channels by what names them: the other rank, say; several names may share one."""

    outgoing: Mapping[Key, Sender] = field(default_factory=dict)
    incoming: Mapping[Key, Receiver] = field(default_factory=dict)

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in each waiting or later receive."""
        for receiver in dict.fromkeys(self.incoming.values()):
            receiver.interrupt(error)

    def close(self, *, failed: bool = False) -> None:
        """Closes the channels, when all has arrived unless the run has failed. Collective."""
        for sender in dict.fromkeys(self.outgoing.values()):
            sender.close(failed=failed)
        for receiver in dict.fromkeys(self.incoming.values()):
            receiver.close(failed=failed)


Links: TypeAlias = ChannelEnds[tuple[int, int]]
"""The channels of one rank between neighbouring stages, by the stage that sends and the other."""


def check_links(links: Links, shape: PipelineShape) -> None:
    """Checks that a rank's channels are those between its stages and their neighbours.

    Raises:
        ValueError: The channels have been opened for stages in other places.
    """
    own, pairs = {*shape.stages}, ((s, s + 1) for s in range(shape.num_stages - 1))
    wanted = {pair for pair in pairs if own & {*pair}}
    found = {(min(ends), max(ends)) for ends in (*links.outgoing, *links.incoming)}
    if found != wanted:
        raise ValueError(
            f"Open the channels by `connect(..., rank_of_stage={list(shape.rank_of_stage)})`: rank"
            f" {shape.rank} has the stages {list(shape.stages)} under {shape.schedule!r}, and"
            f" channels between the stages {sorted(found)}, not {sorted(wanted)}."
        )
