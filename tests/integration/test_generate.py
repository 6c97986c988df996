"""Greedy tokens of a GPT in stages and tensor-parallel: those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import TensorParallelStrategy
from recipes.generate import TextGenerator, generate, generate_in_stages
from recipes.gpt import build_gpt
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

SIZES = {"width": 16, "depth": 3, "num_heads": 2}
PROMPTS = torch.arange(35).view(5, 7)
NUM_TOKENS = 9
CUTS = {2: (0, 2, 5), 3: (0, 2, 4, 5)}


def make_model() -> Any:
    torch.manual_seed(0)
    return build_gpt(**SIZES).double()


def in_stages(num_stages: int, num_microbatches: tuple[int, ...]) -> list[torch.Tensor]:
    dist.init_process_group("gloo")
    cut = CUTS[num_stages][dist.get_rank() :]
    stage = make_model()[cut[0] : cut[1]]
    found = [generate_in_stages(stage, PROMPTS, NUM_TOKENS, m) for m in num_microbatches]
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches"),
    [(2, (1, 2, 5)), pytest.param(3, (2, 3, 4), marks=pytest.mark.long)],
)
def test_stages(workers: WorkerPool, num_stages: int, num_microbatches: tuple[int, ...]) -> None:
    expected = generate(make_model(), PROMPTS, NUM_TOKENS)
    assert len(expected.unique()) > 4
    for found in workers.run(num_stages, in_stages, num_stages, num_microbatches):
        assert all(torch.equal(tokens, expected) for tokens in found)


def tensor_parallel() -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    module = TextGenerator(NUM_TOKENS, **SIZES).double()
    module.model = make_model()
    trainer = make_trainer(devices=2, strategy=TensorParallelStrategy())
    loader = DataLoader(TensorDataset(PROMPTS, PROMPTS), batch_size=3)
    predictions = trainer.predict(module, loader)
    assert predictions is not None
    held = module.model[1].attention.qkv.weight
    local = held.to_local() if hasattr(held, "to_local") else held
    return torch.cat(list(predictions)), local.numel()  # type: ignore[arg-type]


def test_tensor_parallel(workers: WorkerPool) -> None:
    expected = generate(make_model(), PROMPTS, NUM_TOKENS)
    for found, num_held in workers.run(2, tensor_parallel):
        assert torch.equal(found, expected)
        assert num_held == 3 * 16 * 16 // 2, "each rank has half of the heads"
