"""The sharding of a module stays with the module, for another Trainer to go on with.

Any script may call ``trainer.fit(module)`` and then ``Trainer(...).test(module)``. A module cannot
be unsharded: FSDP2 has no way back, and no rank may have room for the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import lightning.pytorch as pl
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.strategies.mesh_runtime.sharded_module import ShardedModule

_ATTRIBUTE = "_lightning_dist_sharding"
_ADVICE = "Give both Trainers the same, or load a checkpoint of the module into a new one."


@dataclass(frozen=True)
class KeptSharding:
    """A module as it was sharded; an attribute of the module, and of no copy of it.

    Attributes:
        settings: The settings that Trainers must have in common to run it, by name.
        mesh: The ranks that hold the shards.
    """

    sharded: ShardedModule
    settings: dict[str, Any]
    mesh: DeviceMesh

    def keep(self) -> None:
        """Stores itself in the module."""
        setattr(self.sharded.module, _ATTRIBUTE, self)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leaves itself out of copies and files."""
        return type(None), ()


def find_sharding(
    module: pl.LightningModule, settings: dict[str, Any], mesh: DeviceMesh
) -> ShardedModule | None:
    """Returns the module as an earlier Trainer has sharded it; None if none has.

    Raises:
        ValueError: The module was sharded in another way, or on ranks whose state is unknown.
    """
    kept = vars(module).get(_ATTRIBUTE)
    if not isinstance(kept, KeptSharding) or kept.sharded.module is not module:
        return None
    differing = list(_differing(kept.settings, settings))
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


def forget_replicas(module: pl.LightningModule) -> None:
    """Forgets how an earlier run placed a module that each rank has whole, as evaluations do.

    Raises:
        ValueError: The module is cut or sharded.
    """
    kept = vars(module).get(_ATTRIBUTE)
    if not isinstance(kept, KeptSharding) or kept.sharded.module is not module:
        return
    mesh: MeshShape = kept.settings["mesh"]
    if kept.sharded.is_sharded or mesh.pp * mesh.tp > 1:
        raise ValueError(
            f"AutoStrategy measures a whole module, and this one is on {mesh}, of an earlier"
            " Trainer. Use that Trainer's strategy, or load a checkpoint of the module into a new"
            " one."
        )
    delattr(module, _ATTRIBUTE)


def _differing(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Lists the arguments that differ, however deep they are."""
    for name, old in before.items():
        new = now.get(name, old)
        if old == new:
            continue
        if is_dataclass(old) and type(old) is type(new):
            names = [part.name for part in fields(old)]
            parts = ({n: getattr(each, n) for n in names} for each in (old, new))
            yield from _differing(*parts)
        else:
            yield name, old, new
