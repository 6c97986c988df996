"""A batch draws its own random numbers, and leaves the caller's generators as they were."""

from __future__ import annotations

import pickle

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.tensors.rng import random_states
from tests.helpers.processes.threads import run_ranks, shapes_of

BATCH = torch.linspace(-1, 1, 24).reshape(6, 4)


def make() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)))


def test_a_batch_leaves_the_callers_generators_alone() -> None:
    def run(model: nn.Sequential, pipeline: Pipeline) -> list[Tensor]:
        noises = []

        def step(microbatch: object) -> Tensor:
            noises.append(torch.rand(()))
            output: Tensor = model(BATCH[:3])
            return output.mean()

        before = pickle.dumps(random_states())
        pipeline.train_batch(BATCH, step)
        assert pickle.dumps(random_states()) == before
        with torch.no_grad():
            pipeline.evaluate_batch(BATCH, step, 2)
        assert pickle.dumps(random_states()) == before
        return noises

    [noises] = run_ranks(make, shapes_of("interleaved_1f1b", 2, (1, 1), num_ranks=1), run)
    assert len({float(noise) for noise in noises}) == 4  # two micro-batches of each kind
