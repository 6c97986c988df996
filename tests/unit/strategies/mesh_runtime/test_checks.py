from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from lightning_dist import FSDPStrategy
from lightning_dist.strategies.mesh_runtime import checks
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


def test_buffers_in_another_order_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "gather_objects", lambda own, _: [own, of_other(own)])

    def of_other(own: Any) -> Any:
        if isinstance(own, bytes):
            return b""
        parameter, *buffers = own.items()
        return dict([parameter, *reversed(buffers)])

    module, group = nn.Module(), cast(Any, None)
    module.weight = nn.Parameter(torch.zeros(1))
    for name in "ab":
        module.register_buffer(name, torch.zeros(1))
    message = "The buffer number 0 is 'a' on rank 0 and 'b' on rank 1."
    with pytest.raises(ValueError, match=message):
        checks.check_module(module, group)
