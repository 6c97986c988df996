from __future__ import annotations

from typing import Any

import pytest

from lightning_dist import FSDPStrategy
from lightning_dist.strategies.mesh_runtime.checks import check_reshard, keeps_parameters


def test_parameters_are_kept_where_they_are_not_sharded() -> None:
    kept = [keeps_parameters(shard, "auto", False) for shard in ("parameters", "optimizer")]
    assert kept == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shard": "state"}, "shard='state' is unknown"),
        ({"shard": "gradients", "reshard_after_forward": True}, "these are True and False"),
        ({"shard": "optimizer", "sync_every_microstep": True}, "these are 'auto' and True"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDPStrategy(**arguments)


@pytest.mark.parametrize(("shard_size", "choices"), [(3, "True, False"), (6, "True, False, 2, 3")])
def test_a_refused_resharding_names_what_is_possible(shard_size: int, choices: str) -> None:
    with pytest.raises(ValueError, match=rf"use one of \[{choices}\]\."):
        check_reshard(4, shard_size)
