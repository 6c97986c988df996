"""The mesh: its size along each axis, and the place of each rank.

Sizes are checked before any process group exists, from integers alone. So a wrong size is a
``ValueError`` on each rank and never a hang. ``tp`` is innermost, for its collectives are the most
frequent. ``pp`` is outermost, for it sends the least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Literal

from lightning_dist.engine.common.names import check_count

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")
_NUM_SHOWN = 3


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Sizes of a mesh, outermost axis first.

    Raises:
        ValueError: A size below 1.
    """

    pp: int = 1  # pipeline stages
    dp_replicate: int = 1  # data replicas
    dp_shard: int = 1  # ranks that shard one replica
    tp: int = 1  # tensor-parallel ranks

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for name, size in self.sizes.items():
            check_count(name, size)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, outermost axis first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def world_size(self) -> int:
        """The number of ranks of the mesh."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_size(self) -> int:
        """The number of ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def has_whole_layers(self) -> bool:
        """Whether each rank has its layers whole: all, or those of its stages."""
        return self.dp_shard == self.tp == 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of a global rank along each axis."""
        places: dict[str, int] = {}
        for name in reversed(AXES):
            rank, places[name] = divmod(rank, self.sizes[name])
        return {name: places[name] for name in AXES}

    def data_index(self, rank: int) -> int:
        """Returns the index of a rank along the data axes together."""
        places = self.coordinates(rank)
        return places["dp_replicate"] * self.dp_shard + places["dp_shard"]

    def peers(self, rank: int, *axes: str) -> list[int]:
        """Lists the ranks with a rank's place along all axes but some, in mesh order."""
        own, ranks = self.coordinates(rank), [0]
        for name, size in self.sizes.items():
            places = range(size) if name in axes else (own[name],)
            ranks = [outer * size + place for outer in ranks for place in places]
        return ranks

    def axes_between(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Lists the axes along which global ranks differ, outermost first."""
        places = [self.coordinates(rank) for rank in ranks]
        return tuple(axis for axis in AXES if len({place[axis] for place in places}) > 1)

    def groups(self, *axes: str) -> list[list[int]]:
        """Lists all groups of :meth:`peers`, each once, in the same order on each rank."""
        firsts = self.peers(0, *(name for name in AXES if name not in axes))
        return [self.peers(rank, *axes) for rank in firsts]


def fill_mesh(world_size: int, **sizes: int | Literal["auto"]) -> MeshShape:
    """Creates a mesh of all ranks; at most one size is ``"auto"`` and takes those that are left.

    Raises:
        ValueError: The sizes do not multiply to the world size.
    """
    open_axes = sorted(name for name, size in sizes.items() if size == "auto")
    asked = MeshShape(**{name: size for name, size in sizes.items() if size != "auto"})
    assert len(open_axes) <= 1
    rest, left_over = divmod(world_size, asked.world_size)
    if left_over or rest < 1 or (rest > 1 and not open_axes):
        shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"The sizes {shown} must multiply to the world size of {world_size}. The nearest that"
            f" do are {_nearest(asked, world_size, sizes)}."
        )
    return MeshShape(**asked.sizes | dict.fromkeys(open_axes, rest))


def fill_axis(world_size: int, name: str, size: int | Literal["auto"]) -> int:
    """Returns the size of a strategy's one axis beside the replicas; ``"auto"`` is all ranks.

    Raises:
        ValueError: Ranks would be left over.
    """
    if size == "auto":
        return world_size
    check_count(name, size, instead="'auto'")
    if world_size % size:
        raise ValueError(
            f"{name}={size} does not divide the world of {world_size} processes; use one of"
            f" {divisors(world_size)}, or 'auto' for all."
        )
    return size


def _nearest(asked: MeshShape, world_size: int, axes: Mapping[str, int | str]) -> str:
    """Names the meshes of a world size that differ least from the asked one, as text."""

    def distance(shape: MeshShape) -> tuple[int, float]:
        pairs = [(shape.sizes[a], asked.sizes[a]) for a in AXES if axes.get(a) != "auto"]
        return sum(a != b for a, b in pairs), sum(max(a / b, b / a) for a, b in pairs)

    possible = [m for m in _meshes(world_size) if all(m.sizes[a] == 1 for a in {*AXES} - {*axes})]
    shapes = sorted(possible, key=distance)[:_NUM_SHOWN]
    texts = [
        " x ".join(f"{name}={size}" for name, size in shape.sizes.items() if size > 1)
        for shape in shapes
    ]
    return ", or ".join(text or "a single rank" for text in texts)


def _meshes(world_size: int) -> list[MeshShape]:
    return [
        MeshShape(pp, replicate, shard, world_size // (pp * replicate * shard))
        for pp in divisors(world_size)
        for replicate in divisors(world_size // pp)
        for shard in divisors(world_size // (pp * replicate))
    ]


def divisors(number: int) -> list[int]:
    """Lists the divisors of a number, in rising order."""
    return [d for d in range(1, number + 1) if number % d == 0]
