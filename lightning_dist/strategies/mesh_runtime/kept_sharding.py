"""The sharding of a module stays with the module, for another Trainer to go on with.

Any script may call ``trainer.fit(module)`` and then ``Trainer(...).test(module)``. A module cannot
be unsharded: FSDP2 has no way back, and no rank may have room for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import lightning.pytorch as pl
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule

_ATTRIBUTE = "_lightning_dist_sharding"
_ADVICE = "Give both Trainers the same, or load a checkpoint of the module into a new one."


@dataclass(frozen=True)
class Layout:
    """The settings that Trainers must have in common to run one sharded module.

    Attributes:
        mesh: The sizes of the mesh.
        pipeline: How the model is cut into stages; None for no stages.
        tensor: How layers are sharded over tensor-parallel ranks.
        shard: How parameters are sharded.
        data_axes: The axes that they are sharded over, and gradients averaged over.
        precision: The Trainer's precision.
        mixed_precision: The policy of the ``MixedPrecision`` callback.
        sync_batchnorm: The Trainer's argument; None if nothing is trained and it has no effect.
    """

    mesh: MeshShape
    pipeline: PipelineConfig | None
    tensor: TensorConfig
    shard: ShardConfig
    data_axes: tuple[str, ...]
    precision: str
    mixed_precision: HalfPrecision | None
    sync_batchnorm: bool | None


@dataclass(frozen=True)
class KeptSharding:
    """A module as it was sharded; an attribute of the module, and of no copy of it.

    Attributes:
        sharded: The module.
        layout: The layout that the strategy was asked for.
        mesh: The ranks that hold the shards.
    """

    sharded: ShardedModule
    layout: Layout
    mesh: DeviceMesh

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leaves itself out of copies and files."""
        return type(None), ()


def keep_sharding(kept: KeptSharding) -> None:
    """Stores a module's sharding in the module."""
    setattr(kept.sharded.module, _ATTRIBUTE, kept)


def find_sharding(
    module: pl.LightningModule, layout: Layout, mesh: DeviceMesh
) -> ShardedModule | None:
    """Returns the module as an earlier Trainer has sharded it; None if none has.

    Raises:
        ValueError: The module was sharded in another way, or on ranks whose state is unknown.
    """
    kept = vars(module).get(_ATTRIBUTE)
    if not isinstance(kept, KeptSharding) or kept.sharded.module is not module:
        return None
    earlier = kept.layout
    if layout.sync_batchnorm is None or earlier.sync_batchnorm is None:
        earlier = replace(earlier, sync_batchnorm=layout.sync_batchnorm)
    differing = list(_differing(earlier, layout))
    if differing:
        before = ", ".join(f"{name}={value!r}" for name, value, _ in differing)
        now = ", ".join(f"{name}={value!r}" for name, _, value in differing)
        raise ValueError(
            f"The module is sharded already, by an earlier Trainer with {before}, and this one has"
            f" {now}. {_ADVICE}"
        )
    if kept.mesh is not mesh:
        raise ValueError(
            "The module is sharded already, by an earlier Trainer whose run has failed, or whose"
            " processes have parted since: nothing can be gathered from its shards. Load a"
            " checkpoint of the module into a new one."
        )
    return kept.sharded


def _differing(before: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    """Lists the arguments that differ, however deep they are."""
    for part in fields(before):
        old, new = getattr(before, part.name), getattr(now, part.name)
        if old == new:
            continue
        if is_dataclass(old) and type(old) is type(new):
            yield from _differing(old, new)
        else:
            yield part.name, old, new
