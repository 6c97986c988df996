"""Random numbers that depend on where they are drawn, not on what was drawn before.

The user's step runs on each stage. Its draws before and after the pipelined module (a mask, say)
must be the same on all stages, or the first stage masks other tokens than the last one scores. The
layers' draws (dropout) must differ between stages and data replicas. And a resumed run must draw
the numbers of the uninterrupted run. One rule serves all three: each use seeds the generators from
a few integers that name it. Afterwards it restores the state it found, so that samplers shuffle
alike on all ranks.
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

_CPU = torch.device("cpu")


@contextmanager
def seeded(*identity: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators from integers, and puts their state back at the end.

    Args:
        identity: Integers that name this use: base seed, step, micro-batch, stage and so on.
        device: The device whose generator is seeded beside the CPU's.
    """
    seed = seed_of(identity)
    with _torch_state_kept(device):
        for generator in generators_of(device):
            generator.manual_seed(seed)
        yield


def seed_all(*identity: int, device: torch.device) -> None:
    """Seeds torch's, Python's and numpy's generators as :func:`seeded`, and leaves them so.

    See :func:`random_state_kept`, which takes a tenth of a millisecond and serves a whole batch.
    """
    seed = seed_of(identity)
    for generator in generators_of(device):
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def python_state() -> bytes:
    """Returns what changes when Python's or numpy's generator draws a number."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Puts the state of the generators of torch, the device, Python and numpy back at the end."""
    python, numpys = random.getstate(), np.random.get_state()
    with _torch_state_kept(device):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpys)


@contextmanager
def _torch_state_kept(device: torch.device) -> Iterator[None]:
    generators = generators_of(device)
    # Not by `random_states`, whose arrays cannot be made in a dry run.
    states = [generator.get_state() for generator in generators]
    try:
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
    torch.cuda.init()  # else there are no generators yet
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Broadcasts the first rank's random states. Collective: all ranks of a gloo group call it."""
    if dist.get_world_size(group) == 1:
        return
    states = random_states(device)
    dist.broadcast_object_list(states, group_src=0, group=group)
    set_random_states(states, device)


@contextmanager
def first_ranks_numbers(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
    """Lets all ranks of a gloo group draw the first rank's numbers, as while a model is built.

    Collective: every rank of the group must enter it. Afterwards a rank whose random states
    differed from the first rank's has its own. The device's are included, on which Lightning builds
    a model late.
    """
    own = random_states(device)
    share_random_state(group, device)
    were_alike = pickle.dumps(random_states(device)) == pickle.dumps(own)
    try:
        yield
    finally:
        if not were_alike:
            set_random_states(own, device)


class RandomStream:
    """A stream of random numbers of its own, drawn from the global generators.

    Args:
        identity: Integers that name the stream: streams of the same name draw the same numbers.
    """

    def __init__(self, *identity: int) -> None:
        self._identity = identity
        self._states: list[Any] | None = None

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draws Python's, numpy's and torch's (CPU) numbers from this stream, where it ended."""
        with random_state_kept(_CPU):
            if self._states is None:
                seed_all(*self._identity, device=_CPU)
            else:
                set_random_states(self._states)
            try:
                yield
            finally:
                self._states = random_states()


def random_states(device: torch.device = _CPU) -> list[Any]:
    """Returns the states of all global generators: Python's, numpy's, torch's and the device's."""
    torchs = [generator.get_state().numpy() for generator in generators_of(device)]
    return [random.getstate(), np.random.get_state(), *torchs]


def set_random_states(states: list[Any], device: torch.device = _CPU) -> None:
    """Sets the states that :func:`random_states` has returned for such a device."""
    python, numpys, *torchs = states
    random.setstate(python)
    np.random.set_state(numpys)
    for generator, state in zip(generators_of(device), torchs, strict=True):
        generator.set_state(torch.from_numpy(state))
