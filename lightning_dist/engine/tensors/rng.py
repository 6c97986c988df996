"""Random numbers that depend on where they are drawn, not on what was drawn before.

The user's step runs on each stage. Its draws before and after the pipelined module (a mask, say)
must be the same on all stages, or the first stage masks other tokens than the last one scores. The
layers' draws (dropout) must differ between stages and data replicas. And a resumed run must draw
the numbers of the uninterrupted run. One rule serves all three: each use seeds the generators from
a few integers that name it. Afterwards it restores the state it found, so that samplers shuffle
alike on all ranks.

Ranks that read the same data draw the same random numbers; data replicas draw different ones.

Shuffling, augmentation in the main process and a step's draws before it calls the model come from
the global generators. In an unseeded script each process starts with different generators. In a
seeded script all processes start alike, so that data replicas would drop out the same activations
and augment the same way.
"""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


@contextmanager
def seeded(*identity: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators from integers, and puts their state back at the end.

    Args:
        identity: Integers that name this use: base seed, step, micro-batch, stage and so on.
        device: The device whose generator is seeded beside the CPU's.
    """
    seed = seed_of(identity)
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def seed_all(*identity: int, device: torch.device) -> None:
    """Seeds torch's, Python's and numpy's generators from integers, and leaves them so.

    Args:
        identity: As for :func:`seeded`.
        device: As for :func:`seeded`.
    """
    seed = seed_of(identity)
    for generator in generators_of(device):
        generator.manual_seed(seed)
    seed_python(*identity)


def seed_python(*identity: int) -> None:
    """Seeds Python's and numpy's generators from integers; see :func:`python_state_kept`.

    Args:
        identity: As for :func:`seeded`.
    """
    seed = seed_of(identity)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def python_state_kept() -> Iterator[None]:
    """Puts the state of Python's and numpy's generators back at the end.

    Apart from the seeding, for it takes a tenth of a millisecond and serves a whole batch.
    """
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Puts the state of torch's, Python's and numpy's generators back at the end.

    Args:
        device: The device whose generator is kept beside the CPU's.
    """
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    try:
        with python_state_kept():
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def seed_of(identity: tuple[int, ...]) -> int:
    """Returns one seed for a few integers."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Lists torch's generators that work on a device draws from: the CPU's, and its own."""
    # Not `torch.manual_seed`: without CUDA it formats a stack trace at each call.
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


_HOST = torch.device("cpu")


def share_random_state(group: dist.ProcessGroup) -> None:
    """Broadcasts the first rank's random states. Collective: every rank of the group must call it.

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
    """Lets all ranks of a group draw the first rank's numbers, as while a model is built.

    Collective: every rank of the group must enter it.

    Args:
        group: A gloo group.

    Yields:
        Nothing. Afterwards a rank whose random states differed from the first rank's has its own.
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
    """A stream of random numbers of its own, drawn from the global generators.

    Args:
        identity: Integers that name the stream: streams of the same name draw the same numbers.
    """

    def __init__(self, *identity: int) -> None:
        self._identity = identity
        self._inside: list[Any] | None = None
        self._outside: list[Any] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Puts this stream in the place of Python's, numpy's and torch's (CPU) numbers.

        Yields:
            Nothing. The next time the stream goes on where it has ended.
        """
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Begins to draw from this stream; see :meth:`drawing`."""
        self._outside = random_states()
        if self._inside is None:
            seed_all(*self._identity, device=_HOST)
        else:
            set_random_states(self._inside)

    def leave(self) -> None:
        """Restores the numbers outside of this stream; does nothing before :meth:`enter`."""
        if self._outside is None:
            return
        self._inside = random_states()
        set_random_states(self._outside)
        self._outside = None


def random_states(device: torch.device = _HOST) -> list[Any]:
    """Returns the states of all global generators: Python's, numpy's and torch's.

    Args:
        device: The device whose generator counts, beside the CPU's.
    """
    torchs = [generator.get_state().numpy() for generator in generators_of(device)]
    return [random.getstate(), np.random.get_state(), *torchs]


def set_random_states(states: list[Any], device: torch.device = _HOST) -> None:
    """Sets the states of all global generators.

    Args:
        states: The result of :func:`random_states` for such a device.
        device: As for :func:`random_states`.
    """
    python, numpys, *torchs = states
    random.setstate(python)
    np.random.set_state(numpys)
    for generator, state in zip(generators_of(device), torchs, strict=True):
        generator.set_state(torch.from_numpy(state))
