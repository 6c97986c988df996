"""Which meshes FSDP is left out of."""

from __future__ import annotations

import pytest
import torch

from lightning_dist import FSDPStrategy, MeshStrategy
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.shard_config import ShardConfig


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (MeshShape(), True),
        (MeshShape(dp_replicate=4), True),
        (MeshShape(dp_shard=2), False),
        (MeshShape(dp_replicate=2, dp_shard=2), False),
        (MeshShape(dp_replicate=2, tp=2), False),
        (MeshShape(pp=2, dp_replicate=2), True),
        (MeshShape(pp=2, dp_shard=2), False),
    ],
)
def test_a_mesh_of_whole_layers_is_not_sharded(shape: MeshShape, expected: bool) -> None:
    assert MeshStrategy().replicates(shape) is expected
    assert not FSDPStrategy().replicates(shape)
    offloaded = MeshStrategy(shard=ShardConfig(offload="cpu"))
    assert not offloaded.replicates(shape)  # shards are gathered from the host
    assert not MeshStrategy(shard=ShardConfig(wrap="manual")).replicates(shape)


@pytest.mark.parametrize(("dtype", "sent"), [("float32", "none"), ("bfloat16", "bf16")])
def test_gradients_are_sent_as_shards_would_be(dtype: str, sent: str) -> None:
    config = ShardConfig(reduce_dtype=dtype)  # type: ignore[arg-type]
    assert config.exchange(torch.bfloat16, is_manual=False).compression == sent
    assert config.exchange(None, is_manual=False).compression == "none"
    assert config.exchange(None, is_manual=True).find_unused_parameters
    assert not config.exchange(None, is_manual=False).find_unused_parameters
