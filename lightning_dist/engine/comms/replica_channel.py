"""The channel from the rank that reads a data replica's batches to the replica's other ranks.

The ranks form a chain, in the order of the pipeline. Each rank forwards a batch as soon as it
receives the batch, before the user's code can change it. So no rank copies a batch more than twice,
and no rank waits longer than for the activations. A rank reads its next batch only when its step on
the previous one is over.

A message carries the reader's random states, too. So on each rank hooks and steps between two
batches draw the same numbers as on one device, whatever the reading of a batch has drawn.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.tensors.rng import random_states, set_random_states

_STEP_BYTES = 1024  # so that most objects are as long as the one before, and share its schema


class Event(Enum):
    """An event that the reader reports."""

    FOUND = auto()  # a loader is about to be used
    BEGUN = auto()  # an epoch begins; the content is the length of each loader
    BATCH = auto()  # a batch has been read
    ENDED = auto()  # the loader has no more batches


@dataclass(frozen=True, slots=True)
class Reading:
    """A report of the reader."""

    loader: int  # its number, counted alike on all ranks
    epoch: int  # number of iterators of that loader so far, this one included
    event: Event
    content: Any = None  # a batch, for example


class ReplicaChannel:
    """One rank's place in the chain."""

    def __init__(
        self, device: torch.device, sender: Sender | None, receiver: Receiver | None
    ) -> None:
        self._device = device
        self._sender = sender
        self._receiver = receiver
        self._epochs: dict[int, int] = {}

    @property
    def is_reader(self) -> bool:
        """Whether this rank reads the batches."""
        return self._receiver is None

    def send(self, reading: Reading) -> None:
        """Sends a report of this rank, the reader; returns at once.

        Raises:
            ValueError: A batch cannot be pickled.
        """
        states = pickle.dumps(random_states(self._device))
        try:
            packed = pack((reading, states))
        except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError) as error:
            raise ValueError(
                f"A batch cannot be sent to the other ranks of its replica: {error}. Let the"
                " collate function return what can be pickled, or pass read='each', so that each"
                " rank reads for itself."
            ) from error
        if self._sender is not None:
            self._sender.send(packed)

    def receive(self, loader: int, epoch: int) -> Reading:
        """Waits for the reader's next report on a loader.

        Reports on iterators that this rank has left earlier than the reader are dropped.

        Raises:
            ValueError: The reader has read another loader.
        """
        self._epochs[loader] = epoch
        while True:
            assert self._receiver is not None
            packed = self._receiver.receive()
            if self._sender is not None:
                self._sender.send(packed)
            reading: Reading
            reading, states = unpack(packed)
            set_random_states(pickle.loads(states), self._device)
            if (reading.loader, reading.epoch) == (loader, epoch):
                return reading
            if reading.epoch >= self._epochs.get(reading.loader, 0):
                raise ValueError(
                    f"This rank waits for loader {loader} (counted from 0), and the first rank of"
                    f" its replica has read loader {reading.loader}. Give each rank the same"
                    " loaders, and let all ranks leave an epoch at the same batch."
                )

    def interrupt(self, error: BaseException) -> None:
        """Raises an error in each waiting or later receive."""
        if self._receiver is not None:
            self._receiver.interrupt(error)

    def close(self) -> None:
        """Closes the channel. Collective: every rank of the chain must call it."""
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()


def open_channel(
    group: dist.ProcessGroup, device: torch.device, timeout_seconds: float
) -> ReplicaChannel:
    """Opens this rank's place in the chain of a gloo group, whose first rank reads. Collective.

    The group's timeout is never reached; a rank waits ``timeout_seconds`` for a batch. The random
    state of the device travels along, besides the host's.
    """
    ranks = dist.get_process_group_ranks(group)
    place = dist.get_rank(group)
    host = torch.device("cpu")
    is_last = place + 1 == len(ranks)
    before = ranks[place - 1]
    return ReplicaChannel(
        device=device,
        sender=None if is_last else DistributedSender(group, ranks[place + 1]),
        receiver=DistributedReceiver(group, before, host, timeout_seconds) if place else None,
    )


def pack(value: Any) -> list[Tensor]:
    """Returns the pickled rest of an object as one tensor, and its plain tensors, not copied."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    buffer.write(bytes(-buffer.tell() % _STEP_BYTES))
    return [torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8), *pickler.tensors]


def unpack(packed: list[Tensor]) -> Any:
    """Turns tensors back into an object, which shares their memory; the inverse of :func:`pack`."""
    rest, *tensors = packed
    return _Unpickler(io.BytesIO(rest.numpy().tobytes()), tensors).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._places: dict[int, int] = {}
        self.tensors: list[Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        """Takes a plain tensor out, and returns its index; None for other objects."""
        if type(obj) is not Tensor or not _is_plain(obj):
            return None
        place = self._places.setdefault(id(obj), len(self.tensors))
        if place == len(self.tensors):
            self.tensors.append(obj)
        return place


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        """Returns the tensor of an index."""
        return self._tensors[pid]


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether shape, dtype and elements describe a tensor fully."""
    odd = tensor.is_nested or tensor.is_quantized or tensor.is_meta
    return tensor.layout == torch.strided and not odd
