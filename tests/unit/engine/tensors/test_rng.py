"""Random states: kept behind a use, and taken from the first rank, the device's included."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_dist.engine.tensors import rng
from lightning_dist.engine.tensors.rng import (
    first_ranks_numbers,
    random_state_kept,
    random_states,
    share_random_state,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
GROUP: Any = object()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """A generator that stands for a GPU's, on a rank whose first rank has seed 100 everywhere."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    generator.manual_seed(100)
    torch.manual_seed(100)
    on_gpu, on_cpu = random_states(GPU), random_states(CPU)

    def broadcast(states: list[Any], group_src: int, group: object) -> None:
        states[:] = on_gpu if len(states) == len(on_gpu) else on_cpu

    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "broadcast_object_list", broadcast)
    generator.manual_seed(7)
    torch.manual_seed(7)
    return generator


def draws(*generators: torch.Generator) -> list[float]:
    return [float(torch.rand((), generator=generator)) for generator in generators]


def seeded(seed: int) -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(seed)))


def test_a_rank_takes_the_states_of_its_device_too(gpus: torch.Generator) -> None:
    share_random_state(GROUP, GPU)
    assert draws(torch.default_generator, gpus) == [seeded(100)] * 2


def test_a_model_is_built_with_the_first_ranks_numbers_on_the_device(
    gpus: torch.Generator,
) -> None:
    with first_ranks_numbers(GROUP, GPU):
        assert draws(gpus) == [seeded(100)]
    assert draws(torch.default_generator, gpus) == [seeded(7)] * 2  # its own again


def test_a_cpu_leaves_the_gpu_alone(gpus: torch.Generator) -> None:
    share_random_state(GROUP, CPU)
    assert draws(torch.default_generator, gpus) == [seeded(100), seeded(7)]


def draw_everywhere() -> None:
    torch.rand(3)
    random.random()
    np.random.rand()


def draw_and_fail() -> None:
    draw_everywhere()
    raise ZeroDivisionError


def test_all_generators_are_as_they_were_found(gpus: torch.Generator) -> None:
    before = pickle.dumps(random_states(GPU))
    with random_state_kept(GPU):
        draw_everywhere()
        draws(gpus)
    assert pickle.dumps(random_states(GPU)) == before


def test_a_seeded_use_draws_its_numbers_and_leaves_none(gpus: torch.Generator) -> None:
    before = pickle.dumps(random_states(GPU))
    with rng.seeded(3, 4, device=GPU):
        drawn = draws(torch.default_generator, gpus)
    assert drawn == [seeded(rng.seed_of((3, 4)))] * 2
    assert pickle.dumps(random_states(GPU)) == before


def test_states_are_put_back_behind_an_error() -> None:
    before = pickle.dumps(random_states())
    with pytest.raises(ZeroDivisionError), random_state_kept(CPU), rng.seeded(1, device=CPU):
        draw_and_fail()
    assert pickle.dumps(random_states()) == before
