"""The layouts whose cost is looked at, each for any number of ranks that is a power of two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.schedules.registry import PipelineShape, find_family

LAYERS = 2
"""Of each stage; a pipeline's model grows with it. Of the whole model elsewhere."""


@dataclass(frozen=True)
class Layout:
    """A way to share a model out.

    Attributes:
        name: Of a schedule, or of a strategy.
        mesh: Returns the mesh of some ranks.
        schedule: Name of the pipeline's schedule; empty without stages.
    """

    name: str
    mesh: Callable[[int], MeshShape]
    schedule: str = ""

    def num_stages(self, num_ranks: int) -> int:
        """Returns the number of stages."""
        if not self.schedule:
            return 1
        return len(find_family(self.schedule).rank_of_stage(self.mesh(num_ranks).pp))

    def microbatches(self, wanted: int) -> int:
        """Returns the number of micro-batches of a batch."""
        if not self.schedule:
            return 1
        splits = find_family(self.schedule).update_rule.splits_batches
        return wanted if splits else 1

    def shape(self, num_ranks: int, wanted: int, rank: int) -> PipelineShape:
        """Returns a global rank's part of the pipeline."""
        mesh, num_stages = self.mesh(num_ranks), self.num_stages(num_ranks)
        return PipelineShape(
            self.schedule,
            self.microbatches(wanted),
            (LAYERS,) * num_stages,
            mesh.coordinates(rank)["pp"],
            num_stages // mesh.pp,
        )


def _chain(num_ranks: int) -> MeshShape:
    return MeshShape(pp=num_ranks)


def _square(num_ranks: int) -> MeshShape:
    stages = 2 ** (num_ranks.bit_length() // 2)
    return MeshShape(pp=stages, dp_replicate=num_ranks // stages)


MESH = Layout("1f1b x DDP", _square, "1f1b")
LAYOUTS = {
    layout.name: layout
    for layout in (
        *(
            Layout(name, _chain, name)
            for name in ("1f1b", "interleaved_1f1b", "zbv", "pipedream", "pipedream_2bw")
        ),
        Layout("DDP", lambda n: MeshShape(dp_replicate=n)),
        Layout("FSDP", lambda n: MeshShape(dp_shard=n)),
        MESH,
    )
}
