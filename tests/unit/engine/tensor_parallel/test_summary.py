from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from lightning_dist.engine.tensor_parallel.apply import TensorParallelModule
from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.summary import TensorRow, summarise
from lightning_dist.engine.tensors.dtensor import cut
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank
from recipes.gpt import build_gpt

PLAN = {
    "0.token": "vocab",
    "*.attention.qkv": "colwise",
    "*.attention.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    "3.logits": "colwise_gather",
}
WIDTH, VOCABULARY, FLOAT = 32, 256, 4


def test_each_parameter_has_its_placement_and_the_bytes_of_a_rank() -> None:
    network = nn.Sequential(*build_gpt(VOCABULARY, WIDTH, depth=2))
    whole = {name: tuple(p.shape) for name, p in network.named_parameters()}
    with fake_rank(1, 2):
        styles = resolve_plan(network, PLAN)
        TensorParallelModule(network, styles, init_device_mesh("cpu", (2,)))
        summary = summarise(network, styles)
    rows = {row.pattern: row for row in summary.rows}
    table, half = (VOCABULARY, WIDTH), (VOCABULARY // 2, WIDTH)
    num_bytes = FLOAT * VOCABULARY // 2 * WIDTH
    assert rows["*.token.weight"] == TensorRow(
        "*.token.weight", 1, "vocab", table, half, "sharded on dim 0", num_bytes
    )
    assert rows["*.attention.qkv.weight"].placement == "stacked shards on dim 0"
    assert rows["*.attention.qkv.weight"].held == (3 * WIDTH // 2, WIDTH)
    assert rows["*.attention.out.weight"].placement == "sharded on dim 1"
    assert rows["*.attention.out.weight"].held == (WIDTH, WIDTH // 2)
    norm = rows["*.attention_norm.weight"]
    assert (norm.count, norm.style, norm.placement) == (2, "", "replicated")
    assert norm.num_bytes == 2 * WIDTH * FLOAT
    is_norm = {name: "norm" in name for name in whole}
    elements = {name: torch.Size(shape).numel() for name, shape in whole.items()}
    held = sum(count if is_norm[name] else count // 2 for name, count in elements.items())
    assert summary.num_bytes == held * FLOAT
    lines = str(summary).splitlines()
    assert lines[0].split() == ["parameters", "style", "whole", "on", "each", "rank", "bytes"]
    assert f"{VOCABULARY} x {WIDTH}" in lines[1]
    assert f"{VOCABULARY // 2} x {WIDTH}" in lines[1]
    assert lines[-1].split() == ["all", f"{held * FLOAT:,}"]


def test_a_shard_of_data_ranks_is_the_whole_of_a_tensor_rank() -> None:
    placements = []
    for axis in ("dp_shard", "tp"):
        module = nn.LayerNorm(4, bias=False)
        with fake_rank(0, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
            module.weight = nn.Parameter(cut(torch.ones(4), mesh, [Shard(0)]))
        placements += [row.placement for row in summarise(module, {}).rows]
    assert placements == ["replicated", "sharded on dim 0"]
