"""Ranks that read the same data draw the same random numbers; data replicas draw different ones.

Shuffling, augmentation in the main process and whatever a step draws before it calls the model come
from the global generators. Scripts that nobody seeded start each process with others; seeded ones
start all alike, so that data replicas would drop out the same activations and augment the same way.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lightning_dist.engine.tensors.rng import generators_of, seed_all

_HOST = torch.device("cpu")


def share_random_state(group: dist.ProcessGroup) -> None:
    """Gives all ranks of a group the first one's generators: Python's, numpy's and torch's.

    Args:
        group: A gloo group of the ranks that read the same data.
    """
    if dist.get_world_size(group) == 1:
        return
    states = random_states()
    dist.broadcast_object_list(states, group_src=0, group=group)
    set_random_states(states)


@contextmanager
def first_ranks_numbers(group: dist.ProcessGroup) -> Iterator[None]:
    """Lets all ranks of a group draw what the first one draws, as while a model is built.

    Args:
        group: A gloo group.

    Yields:
        Nothing. Afterwards ranks whose generators were others than the first's have them back.
    """
    own = random_states()
    share_random_state(group)
    were_alike = pickle.dumps(random_states()) == pickle.dumps(own)
    try:
        yield
    finally:
        if not were_alike:
            set_random_states(own)


class RandomStream:
    """Random numbers apart from those of the rest of the program, by the same global generators.

    Args:
        identity: Integers that name it: streams of the same name draw the same numbers.
    """

    def __init__(self, *identity: int) -> None:
        self._identity = identity
        self._inside: list[Any] | None = None
        self._outside: list[Any] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Puts this stream in the place of Python's, numpy's and torch's (CPU) numbers.

        Yields:
            Nothing. The next time it goes on where it has ended.
        """
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begins what :meth:`drawing` does."""
        self._outside = random_states()
        if self._inside is None:
            seed_all(*self._identity, device=_HOST)
        else:
            set_random_states(self._inside)

    def leave(self) -> None:
        """Ends it; does nothing if it has not begun."""
        if self._outside is None:
            return
        self._inside = random_states()
        set_random_states(self._outside)
        self._outside = None


def random_states(device: torch.device = _HOST) -> list[Any]:
    """Gives the states of all global generators: Python's, numpy's and torch's.

    Args:
        device: Whose generator is one of torch's, beside the host's.
    """
    torchs = [generator.get_state().numpy() for generator in generators_of(device)]
    return [random.getstate(), np.random.get_state(), *torchs]


def set_random_states(states: list[Any], device: torch.device = _HOST) -> None:
    """Sets the states of all global generators.

    Args:
        states: What :func:`random_states` has given for such a device.
        device: As for :func:`random_states`.
    """
    python, numpys, *torchs = states
    random.setstate(python)
    np.random.set_state(numpys)
    for generator, state in zip(generators_of(device), torchs, strict=True):
        generator.set_state(torch.from_numpy(state))
