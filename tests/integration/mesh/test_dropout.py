"""Dropout on a mesh: the same where ranks hold the same activation, and each run alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.engine.tensors.dtensor import whole
from tests.helpers.gpt_parity import data, make_gpt
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

PROBABILITY = 0.3


def fit(sizes: dict[str, int], tensor: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Gives the parameters in the end, and what was dropped on the way."""
    module = make_gpt(dropout=PROBABILITY)
    strategy = MeshStrategy(
        **{"dp_shard": 1, **sizes},
        pipeline=PipelineConfig(num_microbatches=2),
        tensor=TensorConfig(**tensor),
    )
    devices = torch.Size(sizes.values()).numel()
    trainer = make_trainer(devices=devices, strategy=strategy, limit_val_batches=0)
    dropped: list[Tensor] = []

    def note(_: nn.Module, args: Any, output: Tensor) -> None:
        dropped.append(((output == 0) & (args[0] != 0)).flatten())

    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.register_forward_hook(note)
    loader = DataLoader(data(), batch_size=4)
    trainer.fit(module, loader, loader)
    state = {name: whole(p.detach()).clone() for name, p in module.named_parameters()}
    return state, torch.cat(dropped)


def fit_twice(*arguments: Any) -> tuple[tuple[dict[str, Tensor], Tensor], ...]:
    return fit(*arguments), fit(*arguments)


SEQUENCE = {"sequence_parallel": True}
CASES: dict[str, tuple[dict[str, int], dict[str, Any], bool]] = {
    "tp 2": ({"tp": 2}, {}, True),
    "tp 2, sequence": ({"tp": 2}, SEQUENCE, False),
    "shards 2": ({"dp_shard": 2}, {}, False),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, {}, True),
    "pp 2 x tp 2, sequence": ({"pp": 2, "tp": 2}, SEQUENCE, False),
    "pp 2 x shards 2": ({"pp": 2, "dp_shard": 2}, {}, False),
}


@pytest.mark.some("pp 2 x tp 2, sequence")
@pytest.mark.parametrize("name", CASES)
def test_ranks_drop_alike_where_they_hold_the_same(workers: WorkerPool, name: str) -> None:
    sizes, tensor, is_shared = CASES[name]
    devices = torch.Size(sizes.values()).numel()
    twice = workers.run(devices, fit_twice, sizes, tensor)
    ranks = [once for once, _ in twice]
    for (state, dropped), (other_state, other_dropped) in twice:
        assert torch.equal(dropped, other_dropped)
        assert all(torch.equal(value, other_state[key]) for key, value in state.items())
        assert float(dropped.double().mean()) == pytest.approx(PROBABILITY, abs=0.02)
    num_stages = sizes.get("pp", 1)
    for first in range(0, devices, devices // num_stages):  # the ranks of one stage
        (state, dropped), (peers_state, peers_dropped) = ranks[first], ranks[first + 1]
        agree = float((dropped == peers_dropped).double().mean())
        independent = PROBABILITY**2 + (1 - PROBABILITY) ** 2
        assert agree == pytest.approx(1.0 if is_shared else independent, abs=0.03)
        assert torch.equal(dropped, peers_dropped) == is_shared
        assert all(torch.equal(value, peers_state[key]) for key, value in state.items())
