"""Random numbers that depend on where they are drawn, not on what was drawn before.

The user's step runs on each stage, and what it draws before and after the pipelined module (a
mask, say) must be the same on all of them, or the first stage masks other tokens than the last one
scores.
What the layers draw (dropout) must differ between stages and data replicas. And a resumed run must
draw what the uninterrupted one would have. One rule serves all three: each use seeds the generators
from a few integers that name it, and afterwards puts back the state it found, so that samplers
shuffle alike on all ranks.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(*identity: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators from integers, and puts their state back at the end.

    Args:
        identity: Integers that name this use: base seed, step, micro-batch, stage and so on.
        device: The device whose generator is seeded beside the CPU's.

    Yields:
        Nothing.
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

    Yields:
        Nothing.
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

    Yields:
        Nothing.
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
    """Makes one seed of a few integers."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Lists torch's generators that work on a device draws from: the CPU's, and its own."""
    # Not `torch.manual_seed`: without CUDA it formats a stack trace at each call.
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
