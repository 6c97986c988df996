"""The machine of a plan: its ranks, their memory, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_dist.engine.common.mesh_shape import AXES, MeshShape
from lightning_dist.engine.common.names import check_count, check_positive
from lightning_dist.engine.planning.links import Link, LinksByKind
from lightning_dist.engine.planning.traffic import MessageKind

NO_LINK = LinksByKind(Link(0.0, float("inf")))
"""The link of a rank to itself."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The ranks that a plan is for.

    Attributes:
        world_size: Number of all ranks.
        memory_bytes: Bytes that a rank may use.
        num_hosts: Number of hosts, each with as many ranks.
        within: Links between ranks of a host, while all of them send.
        between: Links of a host to the others; its ranks share them.
        alone: What gathering and reducing a unit's parameters takes on a rank that shares them with
            no other, by copies and hooks.
        tensor_seconds: What a tensor-parallel layer takes of its host in a forward and backward,
            beside computing and sending.
        update_seconds: What the update of a sharded or replicated parameter takes of its host,
            beside computing.
        stage_seconds: What a micro-batch takes of a stage's host in a forward and backward, beside
            computing and sending.
        processors: Ranks of a host that compute at the same time; None for all. On a CPU: the cores
            over the threads of a rank.
        overlap: Share of a collective's time in which its rank computes on. It is near 1 on GPUs.
            On CPUs a collective takes the cores that would compute.

    Raises:
        ValueError: A number is out of range, or the hosts do not divide the ranks.
    """

    world_size: int
    memory_bytes: float
    num_hosts: int = 1
    within: LinksByKind = NO_LINK
    between: LinksByKind = NO_LINK
    alone: LinksByKind = NO_LINK
    tensor_seconds: float = 0.0
    update_seconds: float = 0.0
    stage_seconds: float = 0.0
    processors: float | None = None
    overlap: float = 0.0

    def __post_init__(self) -> None:
        """Checks the numbers."""
        check_count("world_size", self.world_size)
        check_count("num_hosts", self.num_hosts)
        if self.world_size % self.num_hosts:
            raise ValueError(
                f"num_hosts={self.num_hosts} does not divide the world of {self.world_size} ranks."
                " Plan for hosts with equally many ranks."
            )
        if not self.memory_bytes > 0:
            raise ValueError(f"memory_bytes={self.memory_bytes} must be above zero.")
        if not 0 <= self.overlap <= 1:
            raise ValueError(f"overlap={self.overlap} must be in [0, 1].")
        if self.processors is not None:
            check_positive("processors", self.processors)

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks of a host."""
        return self.world_size // self.num_hosts

    @property
    def crowding(self) -> float:
        """Ranks that share a processor, at least 1."""
        return 1.0 if self.processors is None else max(1.0, self.ranks_per_host / self.processors)

    def link(self, mesh: MeshShape, axis: str, kind: MessageKind) -> Link:
        """Returns the link of the slowest ring along an axis, while all groups of the axis send.

        Ranks that follow each other along an axis are ``stride`` apart. If a ring leaves a host,
        as many rings do as there are ranks in a stride, and they share the host's link.
        """
        if mesh.sizes[axis] == 1:
            return NO_LINK.send
        stride = 1
        for inner in AXES[AXES.index(axis) + 1 :]:
            stride *= mesh.sizes[inner]
        if stride * mesh.sizes[axis] <= self.ranks_per_host:
            return self.within.of(kind)
        return self.between.of(kind).times(1 / min(stride, self.ranks_per_host))
