"""The ends of channels that one rank of a pipeline has, by what they are for.

Two stages of a rank may use one channel. So all ends of a rank are interrupted and closed together,
each once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import override

from lightning_dist.engine.comms.channel import Receiver, Sender

Key = TypeVar("Key")


class ChannelSet(ABC):
    """Closes and interrupts the ends of channels; several uses may share an end."""

    @abstractmethod
    def senders(self) -> Iterable[Sender]:
        """Returns the ends out of this process."""

    @abstractmethod
    def receivers(self) -> Iterable[Receiver]:
        """Returns the ends into this process."""

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in each waiting or later receive."""
        for receiver in dict.fromkeys(self.receivers()):
            receiver.interrupt(error)

    def close(self, *, failed: bool = False) -> None:
        """Closes the channels, when all has arrived unless the run has failed. Collective."""
        for sender in dict.fromkeys(self.senders()):
            sender.close(failed=failed)
        for receiver in dict.fromkeys(self.receivers()):
            receiver.close(failed=failed)


@dataclass(frozen=True)
class Links(ChannelSet):
    """The channels of one rank to its neighbours, by this rank's stage; stages may share one."""

    activations_in: dict[int, Receiver] = field(default_factory=dict)
    activations_out: dict[int, Sender] = field(default_factory=dict)
    gradients_in: dict[int, Receiver] = field(default_factory=dict)
    gradients_out: dict[int, Sender] = field(default_factory=dict)

    @override
    def senders(self) -> Iterable[Sender]:
        return (*self.activations_out.values(), *self.gradients_out.values())

    @override
    def receivers(self) -> Iterable[Receiver]:
        return (*self.activations_in.values(), *self.gradients_in.values())


@dataclass(frozen=True)
class ChannelEnds(ChannelSet, Generic[Key]):
    """The ends of channels by what names them: the other rank, say."""

    outgoing: Mapping[Key, Sender] = field(default_factory=dict)
    incoming: Mapping[Key, Receiver] = field(default_factory=dict)

    @override
    def senders(self) -> Iterable[Sender]:
        return self.outgoing.values()

    @override
    def receivers(self) -> Iterable[Receiver]:
        return self.incoming.values()
