from __future__ import annotations

from typing import Any

import pytest

from lightning_dist import FSDPStrategy
from lightning_dist.strategies.mesh_runtime.checks import keeps_parameters


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
