from __future__ import annotations

import pytest

from lightning_dist.doctor.command import parse_choice, suitable_choices
from lightning_dist.engine.common.mesh_shape import MeshShape


def test_a_strategy_is_named_with_its_sizes() -> None:
    assert parse_choice("mesh:pp=2,tp=2").build().mesh_shape(8) == MeshShape(2, 1, 2, 2)
    assert parse_choice("fsdp:shard_size=2").build().mesh_shape(4).dp_replicate == 2
    assert parse_choice("pipeline_zbv").is_exact
    assert not parse_choice("pipeline_pipedream_2bw").is_exact


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dpp", "dpp: use one of ddp, fsdp"),
        ("ddp:size=2", "unexpected keyword argument 'size'"),
        ("mesh:tp=0", "tp=0"),
    ],
)
def test_a_wrong_strategy_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_choice(text)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8, 12])
def test_the_strategies_of_each_number_of_ranks_fit_it(world_size: int) -> None:
    for choice in suitable_choices(world_size):
        assert choice.build().mesh_shape(world_size).world_size == world_size
