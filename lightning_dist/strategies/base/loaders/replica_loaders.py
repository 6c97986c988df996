"""One reader per data replica: the loaders of its first rank send, those of the others receive.

The reader reads in its main thread when Lightning asks for a batch. So datasets, samplers and
augmentations draw the same numbers as on one device. Loaders of other ranks are never iterated.

Hooks may iterate a loader of the Trainer by themselves, maybe on one rank alone. Such a rank reads
its own loader, and nothing is sent: only the iterators that Lightning's loops make are shared.

A loader that can go on where it was has a state. Lightning saves that of rank 0 and loads it on all
ranks. That is right for a count of batches, and wrong for a reader of shards, whose replicas read
others and are elsewhere in them. So checkpoints have the states of all replicas' loaders.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.comms.replica_channel import Event, Reading, ReplicaChannel
from lightning_dist.strategies.base.lightning_loaders import is_iterated_by_loop
from lightning_dist.strategies.base.loaders.loader_proxy import LoaderProxy

_KEY = "lightning_dist_loaders"
_LIGHTNINGS = "combined_loader"


class SendingLoader(LoaderProxy):
    """Reads the user's loader, and sends each batch under the loader's number.

    Attributes:
        is_reading: Whether the user's loader is making a batch at this moment.
    """

    is_reading = False

    def __init__(self, loader: Any, number: int, all_loaders: ReplicaLoaders) -> None:
        super().__init__(loader)
        self._number = number
        self._all = all_loaders
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch."""
        iterator: Iterator[Any] = iter(self._loader)
        if not is_iterated_by_loop():
            return iterator
        self._epoch += 1
        self._send(self._epoch, Event.BEGUN, self._all.lengths())
        return self._read(iterator, self._epoch)

    def _read(self, iterator: Iterator[Any], epoch: int) -> Iterator[Any]:
        for position in count():
            self.is_reading = True
            try:
                batch = next(iterator)
            except StopIteration:
                break
            finally:
                self.is_reading = False
            # In prediction: the indices of the samples in the batch.
            seen = getattr(getattr(self._loader, "batch_sampler", None), "seen_batch_indices", None)
            self._send(epoch, Event.BATCH, (batch, None if seen is None else seen[position]))
            yield batch
        self._send(epoch, Event.ENDED)

    def _send(self, epoch: int, event: Event, content: Any = None) -> None:
        self._all.channel.send(Reading(self._number, epoch, event, content))


class ReceivingLoader(LoaderProxy):
    """Yields the batches of the replica's first rank, with the attributes of this rank's loader.

    ``length`` is the number of batches of an epoch on the first rank, if known.
    """

    length: int | None = None

    def __init__(self, loader: Any, number: int, all_loaders: ReplicaLoaders) -> None:
        super().__init__(loader)
        self._number = number
        self._all = all_loaders
        self._epoch = 0
        if self.has_state:  # the first rank has it
            self.state_dict = dict
            self.load_state_dict = lambda _: None

    @override
    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("The loader has no length on the first rank of this data replica.")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Begins an epoch when the first rank has."""
        if not is_iterated_by_loop():
            return iter(self._loader)
        self._epoch += 1
        self._all.note_lengths(self._all.channel.receive(self._number, self._epoch).content)
        return self._receive(self._epoch)

    def _receive(self, epoch: int) -> Iterator[Any]:
        seen: list[Any] = []
        while True:
            reading = self._all.channel.receive(self._number, epoch)
            if reading.event is Event.ENDED:
                return
            batch, indices = reading.content
            if indices is not None:
                seen.append(indices)
                self._loader.batch_sampler.seen_batch_indices = seen
            yield batch


class ReplicaLoaders:
    """Puts one rank's loaders in the place of the user's, by the rank's end of the channel."""

    def __init__(self, channel: ReplicaChannel) -> None:
        self.channel = channel
        self._count = 0
        # Loaders may be made anew in each epoch; those of past epochs are not to be held.
        self._senders: WeakValueDictionary[int, SendingLoader] = WeakValueDictionary()
        self._receivers: WeakValueDictionary[int, ReceivingLoader] = WeakValueDictionary()

    def wrap(self, loader: Any) -> LoaderProxy:
        """Wraps a loader for Lightning to iterate. Collective for the ranks of a replica."""
        number, self._count = self._count, self._count + 1
        if self.channel.is_reader:
            sending = SendingLoader(loader, number, self)
            self._senders[number] = sending
            self.channel.send(Reading(number, 0, Event.FOUND, self.lengths()))
            return sending
        receiving = ReceivingLoader(loader, number, self)
        self._receivers[number] = receiving
        self.note_lengths(self.channel.receive(number, 0).content)
        return receiving

    @property
    def is_reading(self) -> bool:
        """Whether this rank is reading a batch for the others."""
        return any(loader.is_reading for loader in self._senders.values())

    def lengths(self) -> dict[int, int | None]:
        """Returns the present lengths: a batch sampler may have another one in each epoch."""
        return {number: sized_len(loader) for number, loader in self._senders.items()}

    def note_lengths(self, lengths: dict[int, int | None]) -> None:
        """Takes what :meth:`lengths` returns on the first rank."""
        for number, length in lengths.items():
            loader = self._receivers.get(number)
            if loader is not None:
                loader.length = length


def keep_loader_states(checkpoint: dict[str, Any], group: dist.ProcessGroup) -> None:
    """Adds the states of all replicas' training loaders. Collective: every rank must call it."""
    states: list[dict[str, Any]] | None = _loop_state(checkpoint).get(_LIGHTNINGS)
    all_states = gather_objects(states, group)
    if all(states and any(states) for states in all_states):  # elastic ones have empty states
        checkpoint[_KEY] = all_states


def take_loader_states(checkpoint: dict[str, Any], replica: int, num_replicas: int) -> None:
    """Puts a replica's own states where Lightning looks for them."""
    all_states = checkpoint.pop(_KEY, None)
    if all_states is None:
        return
    if len(all_states) != num_replicas:
        rank_zero_warn(
            f"The checkpoint has the states of {len(all_states)} data replicas' loaders, and there"
            f" are {num_replicas} now. The epoch goes on where the first one was. To read no sample"
            " twice, resume on as many replicas, or from the end of an epoch."
        )
        replica = 0
    _loop_state(checkpoint)[_LIGHTNINGS] = all_states[replica]


def _loop_state(checkpoint: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    return state
