"""The ends of channels that one rank of a pipeline has, by what they are for.

Two stages of a rank may use one channel. So all ends of a rank are interrupted and closed together,
each once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from lightning_dist.engine.comms.channel import Receiver, Sender

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
