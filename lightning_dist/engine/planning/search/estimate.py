"""The cost of a step on a layout: compute, bubble, exposed communication and memory.

A step without stages is a forward, a backward and an update. With stages it is what the simulator
says. Around it, parameters are gathered and gradients reduced along the data axes, by rings. On
stages they are gathered once for all micro-batches; without stages twice, and beside the compute,
as far as the machine can.

All ranks of a host share its processors. So a step takes no less than the work of all of them on
the processors, whatever the schedule: where ranks share a core, one fills another's bubble.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate

from lightning_dist.engine.planning.layer_costs import LayerCosts, activations_of
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.partition import MemoryLimit, partition_layers
from lightning_dist.engine.planning.search.held import (
    Flights,
    bytes_between_stages,
    bytes_per_parameter_byte,
    count_flights,
    memory_of_rank,
)
from lightning_dist.engine.planning.search.layout import INSIDE, Estimate, Layout, Wait
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.messages import along_data, batch_to_ranks, inside_layers
from lightning_dist.engine.planning.search.model_costs import MeasuredBatch, ModelCosts
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.engine.schedules.registry import build_schedule, find_family
from lightning_dist.engine.schedules.schedule import Schedule
from lightning_dist.engine.schedules.simulator import StageCosts, makespan_seconds

_Key = tuple[float, int, bool, int | None]
"""What the costs of a micro-batch depend on: the arguments of :meth:`.ModelCosts.at`."""

_Shape = tuple[str, int, int, int]
"""What a schedule depends on."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """The costs of a micro-batch over all layers."""

    seconds: float
    own_seconds: float  # of each stage
    longest_seconds: float  # of a layer
    parameter_bytes: int
    frozen_bytes: int
    buffer_bytes: int
    kept_bytes: float
    recomputed_bytes: float  # of the largest layer that runs again in a backward


@dataclass(slots=True)
class _Part:
    """A rank's part of a pipeline: its seconds of a micro-batch, and its layers."""

    busy_seconds: float = 0.0
    layers: list[LayerCosts] = field(default_factory=list)

    @property
    def parameter_bytes(self) -> int:
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def frozen_bytes(self) -> int:
        return sum(layer.frozen_bytes for layer in self.layers)


class Estimator:
    """Estimates layouts of one model on one machine, and remembers what they have in common."""

    def __init__(self, costs: ModelCosts, machine: Machine) -> None:
        self.costs = costs
        self.machine = machine
        # Per estimator, and not on the class, which would keep the costs alive.
        self._batch = cache(costs.at)
        self._sums = cache(self._sum_up)
        self._even_stages = cache(lambda key, count: self._batch(*key).step.best_cut(count))
        self._partition = cache(self._best_partition)
        self._schedule = cache(_build)
        self._flights = cache(self._count_flights)
        self._makespan = cache(self._simulate)

    def batch(self, layout: Layout) -> MeasuredBatch:
        """Returns the costs of one micro-batch of a layout, without messages."""
        return self._batch(*_key(layout))

    # --- bounds ------------------------------------------------------------------------------

    def least_seconds(self, layout: Layout) -> float:
        """Returns seconds below which no partition of a layout, and no schedule, can be."""
        sums, mesh = self._sums(*_key(layout)), layout.mesh
        own = sums.own_seconds * layout.num_stages
        mean = layout.num_microbatches * (sums.seconds + own) / mesh.pp
        return max(layout.num_microbatches * sums.longest_seconds, mean * self.machine.crowding)

    # --- what layouts have in common ---------------------------------------------------------

    def _best_partition(self, key: _Key, shape: _Shape) -> tuple[int, ...]:
        name, num_stages, _, per_rank = shape
        even_stages = self._even_stages(key, num_stages)
        if per_rank == 1:
            return even_stages
        step = self._batch(*key).step
        homes = find_family(name).rank_of_stage(num_stages // per_rank, per_rank)
        even_ranks = step.evened_out(even_stages, homes)
        if even_ranks == even_stages:
            return even_stages
        return min(
            even_stages, even_ranks, key=lambda cut: self._makespan(step.of_stages(cut), shape)
        )

    def _count_flights(self, shape: _Shape) -> list[Flights]:
        return [count_flights(actions) for actions in self._schedule(shape).ranks]

    def _simulate(self, costs: StageCosts, shape: _Shape) -> float:
        return makespan_seconds(self._schedule(shape), costs)

    def _sum_up(self, size: float, tp: int, recomputes: bool, count: int | None) -> _Sums:
        batch = self._batch(size, tp, recomputes, count)
        step, layers = batch.step, batch.step.layers
        plain = self._batch(size, tp, False, count).step.layers if recomputes else ()
        again = [max(0, layer.activation_bytes - layer.boundary_bytes) for layer in plain]
        return _Sums(
            seconds=step.compute_seconds,
            own_seconds=step.own_forward_seconds + step.own_backward_seconds,
            longest_seconds=max(layer.seconds for layer in layers),
            parameter_bytes=sum(layer.parameter_bytes for layer in layers),
            frozen_bytes=sum(layer.frozen_bytes for layer in layers),
            buffer_bytes=sum(layer.buffer_bytes for layer in layers),
            kept_bytes=activations_of(layers) + batch.rest_bytes,
            recomputed_bytes=max(again, default=0.0),
        )

    def least_bytes(self, layout: Layout) -> float:
        """Returns bytes that the fullest rank of a layout holds at least, those of the mean rank.

        Of one micro-batch each rank keeps all its activations at a time, whatever the schedule.
        """
        sums, mesh = self._sums(*_key(layout)), layout.mesh
        parameters = sums.parameter_bytes / mesh.pp
        held = parameters * bytes_per_parameter_byte(self.costs.states_per_parameter, layout)
        held += (sums.frozen_bytes / mesh.dp_shard + sums.buffer_bytes) / mesh.pp
        return held + sums.kept_bytes / mesh.pp + sums.recomputed_bytes

    # --- estimates ---------------------------------------------------------------------------

    def with_partition(self, layout: Layout) -> Layout:
        """Returns a layout with the partition whose slowest stage, or busiest rank, is fastest."""
        return replace(layout, partition=self._partition(_key(layout), _shape(layout)))

    def fitting(self, layout: Layout) -> Layout | None:
        """Returns a layout with that partition, or the fastest one that fits; None if none does.

        Where ranks have several stages no other partition is tried.
        """
        layout = self.with_partition(layout)
        if self._fits(layout):
            return layout
        if layout.mesh.pp == 1 or layout.stages_per_rank > 1:
            return None
        try:
            other = replace(layout, partition=self._fitting_partition(layout))
        except ValueError:
            return None
        return other if self._fits(other) else None

    def _fits(self, layout: Layout) -> bool:
        return all(held.peak <= self.machine.memory_bytes for held in self._memories(layout))

    def _fitting_partition(self, layout: Layout) -> tuple[int, ...]:
        batch = self.batch(layout)
        layers = batch.step.layers
        per_byte = bytes_per_parameter_byte(self.costs.states_per_parameter, layout)
        shards = layout.mesh.dp_shard
        needs = [batch.transient_bytes, *(layer.transient_bytes for layer in layers)]
        beside = batch.rest_bytes + max(needs) + 6.0 * max(c.boundary_bytes for c in layers)
        limit = MemoryLimit(
            cap_bytes=self.machine.memory_bytes - beside,
            resident_bytes=[
                per_byte * c.parameter_bytes + c.frozen_bytes / shards + c.buffer_bytes
                for c in layers
            ],
            flight_bytes=[layer.activation_bytes for layer in layers],
            in_flight=[most for own in self._flights(_shape(layout)) for ((_, most),) in own],
            copy_bytes=[0.0] * len(layers),
            num_copies=[0] * layout.mesh.pp,
        )
        seconds = [layer.seconds for layer in layers]
        return tuple(partition_layers(seconds, layout.mesh.pp, memory=limit))

    def estimate(self, layout: Layout) -> Estimate:
        """Returns the expected cost of a step on a layout with a partition."""
        return self._whole(layout) if layout.mesh.pp == 1 else self._staged(layout)

    def _whole(self, layout: Layout) -> Estimate:
        step, machine = self.batch(layout).step, self.machine
        sums = self._sums(*_key(layout))
        parameters = sums.parameter_bytes
        cost = step.of_stages(layout.partition)
        work = cost.forward_seconds[0] + cost.backward_seconds[0]
        update = self._update(layout, parameters)
        num_units = 1 + sum(c.parameter_bytes + c.frozen_bytes > 0 for c in step.layers)
        waits = along_data(machine, layout, parameters, num_units, 2, sums.frozen_bytes)
        if layout.mesh.tp > 1:
            waits[INSIDE] = inside_layers(machine, layout, self.costs)
        waits |= batch_to_ranks(machine, layout, self.costs.sample_bytes)
        hidden = machine.overlap * work * (num_units - 1) / num_units
        for name in ("gradients", "parameters"):
            if name in waits:  # the last unit's gradients and the first's parameters stay exposed
                wait = waits[name]
                spared = min(hidden, wait.seconds * (num_units - 1) / num_units)
                waits[name] = replace(wait, seconds=wait.seconds - spared)
                hidden -= spared
        return Estimate((work + update) * machine.crowding, 0.0, waits, self.memory(layout))

    def _staged(self, layout: Layout) -> Estimate:
        machine, count, shape = self.machine, layout.num_microbatches, _shape(layout)
        batch, parts = self.batch(layout), self._parts(layout)
        parameters = [part.parameter_bytes for part in parts]
        updates = [self._update(layout, held) for held in parameters]
        busy = [
            count * part.busy_seconds + update for part, update in zip(parts, updates, strict=True)
        ]
        # The busiest rank, or all ranks on a host's processors, which were measured so crowded.
        host = count * layout.stages_per_rank * machine.stage_seconds
        compute = max(*busy, sum(busy) / len(busy) * machine.crowding + host)
        cost, boundary = batch.step.of_stages(layout.partition), self._boundary_bytes(layout)
        alone = max(compute, self._makespan(cost, shape) + max(updates))
        inside = inside_layers(machine, layout, self.costs)
        # A message inside of layers, and the host's time, on each stage.
        extra = (inside.seconds / layout.num_stages + machine.stage_seconds) / 2
        slower = replace(
            cost,
            forward_seconds=tuple(seconds + extra for seconds in cost.forward_seconds),
            backward_seconds=tuple(seconds + extra for seconds in cost.backward_seconds),
            transfer_seconds=machine.link(layout.mesh, "pp", MessageKind.SEND).seconds(boundary),
        )
        later = max(compute, self._makespan(slower, shape) + max(updates)) - alone
        num_units = max(len(part.layers) for part in parts) + layout.stages_per_rank
        frozen = max(part.frozen_bytes for part in parts)
        waits = batch_to_ranks(machine, layout, self.costs.sample_bytes)
        waits |= along_data(machine, layout, max(parameters), num_units, 1, frozen)
        if inside.seconds:
            seconds = min(later, count * inside.seconds / layout.mesh.pp)
            waits[INSIDE] = Wait(count * inside.num_bytes / layout.mesh.pp, seconds)
            later -= seconds
        waits["activations"] = Wait(2.0 * count * boundary * layout.stages_per_rank, later)
        return Estimate(compute, alone - compute, waits, self.memory(layout))

    def _boundary_bytes(self, layout: Layout) -> float:
        layers = self.batch(layout).step.layers
        return max(layers[end - 1].boundary_bytes for end in accumulate(layout.partition[:-1]))

    def _parts(self, layout: Layout) -> list[_Part]:
        """Returns the part of each rank of a pipeline."""
        step = self.batch(layout).step
        cost, parts = step.of_stages(layout.partition), [_Part() for _ in range(layout.mesh.pp)]
        family = find_family(layout.schedule)
        homes = family.rank_of_stage(layout.mesh.pp, layout.stages_per_rank)
        for stage, (home, end) in enumerate(zip(homes, accumulate(layout.partition), strict=True)):
            own = step.layers[end - layout.partition[stage] : end]
            parts[home].layers += own
            parts[home].busy_seconds += cost.forward_seconds[stage] + cost.backward_seconds[stage]
        return parts

    def memory(self, layout: Layout) -> RankMemory:
        """Returns the memory of the fullest rank, of a layout with a partition."""
        return max(self._memories(layout), key=lambda memory: memory.peak)

    def _memories(self, layout: Layout) -> Iterator[RankMemory]:
        """Yields the memory of each stage's rank; the first ones are often the fullest."""
        batch, again = self.batch(layout), self._sums(*_key(layout)).recomputed_bytes
        kept, needs = batch.held_by_stages(layout.partition)
        if layout.mesh.pp == 1:
            layers = batch.step.layers
            yield memory_of_rank(self.costs, layout, layers, kept[0] + again, needs[0])
            return
        parts, boundary = self._parts(layout), self._boundary_bytes(layout)
        of_ranks = zip(parts, self._flights(_shape(layout)), strict=True)
        for rank, (part, flights) in enumerate(of_ranks):
            most = max(sum(n * kept[s] for s, n in counts) for counts in flights)
            need = max(needs[stage] for counts in flights for stage, _ in counts)
            sent = bytes_between_stages(layout, rank, boundary)
            yield memory_of_rank(self.costs, layout, part.layers, most + again, need, sent)

    def _update(self, layout: Layout, parameters: int) -> float:
        whole, mesh = self.costs.parameter_bytes, layout.mesh
        part = parameters / whole if whole else 1.0
        seconds = self.batch(layout).step.update_seconds * part / mesh.dp_shard
        if mesh.has_whole_layers:  # plain tensors
            return seconds
        return seconds + self.machine.update_seconds * self.costs.num_parameters * part


def _key(layout: Layout) -> _Key:
    count = layout.num_microbatches if layout.mesh.pp > 1 else None
    return layout.microbatch_size, layout.mesh.tp, layout.recomputes, count


def _shape(layout: Layout) -> _Shape:
    sizes = (layout.num_stages, layout.num_microbatches, layout.stages_per_rank)
    return layout.schedule, *sizes


def _build(shape: _Shape) -> Schedule:
    name, num_stages, num_microbatches, stages_per_rank = shape
    return build_schedule(
        name,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
