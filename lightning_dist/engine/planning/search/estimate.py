"""The cost of a step on a layout: compute, bubble, exposed communication and memory.

A step without stages is a forward, a backward and an update. With stages it is what the simulator
says. Around it, parameters are gathered and gradients reduced along the data axes, by rings. On
stages they are gathered once for all micro-batches; without stages twice, and beside the compute,
as far as the machine can.

All ranks of a host share its processors. So a step takes no less than the work of all of them on
the processors, whatever the schedule: where ranks share a core, one fills another's bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

from lightning_dist.engine.planning.layer_costs import activations_of
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.partition import MemoryLimit, partition_layers
from lightning_dist.engine.planning.search.held import (
    Flights,
    bytes_between_stages,
    bytes_per_parameter_byte,
    count_flights,
    held_beside,
    memory_of_part,
    memory_of_whole,
)
from lightning_dist.engine.planning.search.layout import INSIDE, Estimate, Layout, Wait
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.messages import along_data, batch_to_ranks, inside_layers
from lightning_dist.engine.planning.search.model_costs import MeasuredBatch, ModelCosts
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.registry import build_schedule, find_schedules
from lightning_dist.engine.schedules.schedule import Schedule
from lightning_dist.engine.schedules.simulator import StageCosts, makespan_seconds

_Key = tuple[float, int, bool, int | None]
"""What the costs of a micro-batch depend on."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """The costs of a micro-batch over all layers."""

    seconds: float
    own_seconds: float  # of each stage
    longest_seconds: float  # of a layer
    parameter_bytes: int
    kept_bytes: float
    recomputed_bytes: float


@dataclass(slots=True)
class _Part:
    """A rank's part of a pipeline."""

    busy_seconds: float = 0.0
    parameter_bytes: int = 0
    largest_layer_bytes: int = 0  # of parameters
    num_units: int = 0
    update_seconds: float = 0.0


class Estimator:
    """Estimates layouts of one model on one machine, and remembers what they have in common.

    Args:
        costs: Costs of the model.
        machine: The machine.
    """

    def __init__(self, costs: ModelCosts, machine: Machine) -> None:
        self.costs = costs
        self.machine = machine
        self._batches: dict[_Key, MeasuredBatch] = {}
        self._partitions: dict[tuple[_Key, int], tuple[int, ...]] = {}
        self._schedules: dict[tuple[str, int, int, int], Schedule] = {}
        self._in_flight: dict[tuple[str, int, int, int], list[Flights]] = {}
        self._sums: dict[_Key, _Sums] = {}
        self._makespans: dict[Layout, float] = {}

    def batch(self, layout: Layout) -> MeasuredBatch:
        """Returns the costs of one micro-batch of a layout, without messages."""
        size, tp, recomputes, count = key = _key(layout)
        if key not in self._batches:
            found = self.costs.at(size, tp, recomputes=recomputes, num_microbatches=count)
            self._batches[key] = found
        return self._batches[key]

    def partition(self, layout: Layout) -> tuple[int, ...]:
        """Returns the partition whose slowest stage is fastest."""
        key = (_key(layout), layout.num_stages)
        if key not in self._partitions:
            self._partitions[key] = self.batch(layout).step.best_cut(layout.num_stages)
        return self._partitions[key]

    def schedule(self, layout: Layout) -> Schedule:
        """Returns the schedule of a layout with stages."""
        mesh, per_rank = layout.mesh, layout.stages_per_rank
        key = (layout.schedule, mesh.pp, per_rank, layout.num_microbatches)
        if key not in self._schedules:
            self._schedules[key] = build_schedule(
                layout.schedule,
                num_stages=layout.num_stages,
                num_microbatches=layout.num_microbatches,
                stages_per_rank=per_rank,
            )
        return self._schedules[key]

    # --- bounds ------------------------------------------------------------------------------

    def least_seconds(self, layout: Layout) -> float:
        """Returns seconds below which no partition of a layout, and no schedule, can be."""
        sums, mesh = self._sums_of(layout), layout.mesh
        own = sums.own_seconds * layout.num_stages
        mean = layout.num_microbatches * (sums.seconds + own) / mesh.pp
        return max(layout.num_microbatches * sums.longest_seconds, mean * self.machine.crowding)

    def _sums_of(self, layout: Layout) -> _Sums:
        key = _key(layout)
        if key not in self._sums:
            batch = self.batch(layout)
            step, layers = batch.step, batch.step.layers
            loss = step.loss_forward_seconds + step.loss_backward_seconds
            self._sums[key] = _Sums(
                seconds=sum(layer.seconds for layer in layers) + loss,
                own_seconds=step.own_forward_seconds + step.own_backward_seconds,
                longest_seconds=max(layer.seconds for layer in layers),
                parameter_bytes=sum(layer.parameter_bytes for layer in layers),
                kept_bytes=activations_of(layers) + batch.rest_bytes,
                recomputed_bytes=self._recomputed_bytes(layout),
            )
        return self._sums[key]

    def closer_seconds(self, layout: Layout) -> float:
        """Returns seconds that a layout, with its partition, cannot beat under any schedule.

        A rank begins when the first micro-batch has passed the ranks before. After its last
        backward that micro-batch passes them again; where backwards are split, with half of each.
        """
        if layout.mesh.pp == 1:
            return self._whole(layout).step_seconds
        parts, cost = self._parts(layout), self._with_messages(layout, self._stage_costs(layout))
        splits = _splits_backwards(layout.schedule)
        share = cost.input_share if splits else 1.0
        begin = end = least = 0.0
        for rank, part in enumerate(parts):
            work = layout.num_microbatches * part.busy_seconds
            least = max(least, begin + work + (0.0 if splits else end))
            begin += cost.forward_seconds[rank] + cost.transfer_seconds
            end += share * cost.backward_seconds[rank] + cost.transfer_seconds
        least += max(part.update_seconds for part in parts)
        waits = self._along_stages(layout, parts)
        exposed = sum(wait.seconds for wait in waits.values())
        return max(least, self._compute(layout, parts)) + exposed

    def least_bytes(self, layout: Layout) -> float:
        """Returns bytes that the fullest rank of a layout holds at least, those of the mean rank.

        Of one micro-batch each rank keeps all its activations at a time, whatever the schedule.
        """
        sums, mesh = self._sums_of(layout), layout.mesh
        parameters = sums.parameter_bytes / mesh.pp
        held = parameters * bytes_per_parameter_byte(self.costs.states_per_parameter, layout)
        return held + sums.kept_bytes / mesh.pp + sums.recomputed_bytes

    # --- estimates ---------------------------------------------------------------------------

    def with_partition(self, layout: Layout) -> Layout:
        """Returns a layout with the partition whose slowest stage is fastest."""
        whole = layout.mesh.pp == 1
        cut = (self.costs.num_layers,) if whole else self.partition(layout)
        return replace(layout, partition=cut)

    def fitting(self, layout: Layout) -> Layout | None:
        """Returns a layout with its partition, or the fastest one that fits; None if none does.

        Where ranks have several stages no other partition is tried.
        """
        fewer = self._with_fewer_microbatches(layout)
        if fewer is not layout and self._fitting(fewer) is None:
            return None
        return self._fitting(layout)

    def _with_fewer_microbatches(self, layout: Layout) -> Layout:
        """Returns a layout with a shorter schedule, which keeps as many activations or fewer."""
        pp, count = layout.mesh.pp, layout.num_microbatches
        if count <= 2 * pp:
            return layout
        rule = find_schedules(layout.schedule).microbatch_rule
        few = next(n for n in range(2 * pp, 0, -1) if rule.fits(pp, n))
        return replace(layout, num_microbatches=few, batch_size=layout.batch_size // count * few)

    def _fitting(self, layout: Layout) -> Layout | None:
        if self.memory(layout).peak <= self.machine.memory_bytes:
            return layout
        if layout.mesh.pp == 1 or layout.stages_per_rank > 1:
            return None
        try:
            other = replace(layout, partition=self._fitting_partition(layout))
        except ValueError:
            return None
        return other if self.memory(other).peak <= self.machine.memory_bytes else None

    def step_seconds(self, layout: Layout) -> float:
        """Returns the time of a step on a layout with a partition; see :meth:`estimate`."""
        if layout.mesh.pp == 1:
            return self._whole(layout).step_seconds
        parts = self._parts(layout)
        end = self._makespan(layout) + max(part.update_seconds for part in parts)
        exposed = sum(wait.seconds for wait in self._along_stages(layout, parts).values())
        return max(self._compute(layout, parts), end) + exposed

    def estimate(self, layout: Layout) -> Estimate:
        """Returns the expected cost of a step on a layout with a partition."""
        return self._whole(layout) if layout.mesh.pp == 1 else self._staged(layout)

    def _fitting_partition(self, layout: Layout) -> tuple[int, ...]:
        layers = self.batch(layout).step.layers
        per_byte = bytes_per_parameter_byte(self.costs.states_per_parameter, layout)
        batch = self.batch(layout)
        needs = [batch.transient_bytes, *(layer.transient_bytes for layer in layers)]
        beside = batch.rest_bytes + max(needs) + 6.0 * max(c.boundary_bytes for c in layers)
        limit = MemoryLimit(
            cap_bytes=self.machine.memory_bytes - beside,
            resident_bytes=[per_byte * layer.parameter_bytes for layer in layers],
            flight_bytes=[layer.activation_bytes for layer in layers],
            in_flight=[most for own in self._flights(layout) for ((_, most),) in own],
            copy_bytes=[0.0] * len(layers),
            num_copies=[0] * layout.mesh.pp,
        )
        seconds = [layer.seconds for layer in layers]
        return tuple(partition_layers(seconds, layout.mesh.pp, memory=limit))

    def _whole(self, layout: Layout) -> Estimate:
        batch, machine = self.batch(layout), self.machine
        step = batch.step
        parameters = self._sums_of(layout).parameter_bytes
        cost = step.of_stages([len(step.layers)])
        work = cost.forward_seconds[0] + cost.backward_seconds[0]
        update = self._update(layout, parameters)
        num_units = 1 + sum(layer.parameter_bytes > 0 for layer in step.layers)
        waits = along_data(self.machine, layout, parameters, num_units, num_gathers=2)
        waits |= self._inside_layers(layout)
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
        cost, parts = self._stage_costs(layout), self._parts(layout)
        compute = self._compute(layout, parts)
        update = max(part.update_seconds for part in parts)
        alone = max(compute, makespan_seconds(self.schedule(layout), cost) + update)
        later = max(compute, self._makespan(layout) + update) - alone
        waits = self._along_stages(layout, parts)
        count = layout.num_microbatches
        inside = self._inside_layers(layout).get(INSIDE, Wait(0.0, 0.0))
        if inside.seconds:
            seconds = min(later, count * inside.seconds / layout.mesh.pp)
            waits[INSIDE] = Wait(count * inside.num_bytes / layout.mesh.pp, seconds)
            later -= seconds
        sent = 2.0 * count * self._boundary_bytes(layout) * layout.stages_per_rank
        waits["activations"] = Wait(sent, later)
        return Estimate(compute, alone - compute, waits, self.memory(layout))

    def _makespan(self, layout: Layout) -> float:
        """Returns the seconds of the schedule, with messages; shards are as fast as replicas."""
        mesh = replace(layout.mesh, dp_replicate=layout.mesh.data_size, dp_shard=1)
        key = replace(layout, mesh=mesh)
        if key not in self._makespans:
            costs = self._with_messages(layout, self._stage_costs(layout))
            self._makespans[key] = makespan_seconds(self.schedule(layout), costs)
        return self._makespans[key]

    def _stage_costs(self, layout: Layout) -> StageCosts:
        return self.batch(layout).step.of_stages(layout.partition)

    def _with_messages(self, layout: Layout, cost: StageCosts) -> StageCosts:
        """Adds the messages inside of layers, those between stages, and the host's time."""
        inside = sum(wait.seconds for wait in self._inside_layers(layout).values())
        extra = (inside / layout.num_stages + self.machine.stage_seconds) / 2
        link = self.machine.link(layout.mesh, "pp", MessageKind.SEND)
        return replace(
            cost,
            forward_seconds=tuple(seconds + extra for seconds in cost.forward_seconds),
            backward_seconds=tuple(seconds + extra for seconds in cost.backward_seconds),
            transfer_seconds=link.seconds(self._boundary_bytes(layout)),
        )

    def _boundary_bytes(self, layout: Layout) -> float:
        layers = self.batch(layout).step.layers
        return max(layers[end - 1].boundary_bytes for end in accumulate(layout.partition[:-1]))

    def _parts(self, layout: Layout) -> list[_Part]:
        """Returns the part of each rank of a pipeline."""
        cost, layers = self._stage_costs(layout), self.batch(layout).step.layers
        parts = [_Part() for _ in range(layout.mesh.pp)]
        ends = accumulate(layout.partition)
        for stage, (home, end) in enumerate(zip(self._homes(layout), ends, strict=True)):
            part, count = parts[home], layout.partition[stage]
            sizes = [layer.parameter_bytes for layer in layers[end - count : end]]
            part.busy_seconds += cost.forward_seconds[stage] + cost.backward_seconds[stage]
            part.parameter_bytes += sum(sizes)
            part.largest_layer_bytes = max(part.largest_layer_bytes, *sizes)
            part.num_units += 1 + count
        for part in parts:
            part.update_seconds = self._update(layout, part.parameter_bytes)
        return parts

    def _homes(self, layout: Layout) -> tuple[int, ...]:
        family = find_schedules(layout.schedule)
        return family.rank_of_stage(layout.mesh.pp, layout.stages_per_rank)

    def _compute(self, layout: Layout, parts: Sequence[_Part]) -> float:
        """Returns the seconds of the busiest rank, or of all ranks on a host's processors."""
        count = layout.num_microbatches
        busy = [count * part.busy_seconds + part.update_seconds for part in parts]
        host = count * layout.stages_per_rank * self.machine.stage_seconds  # measured so crowded
        return max(*busy, sum(busy) / len(busy) * self.machine.crowding + host)

    def _along_stages(self, layout: Layout, parts: Sequence[_Part]) -> dict[str, Wait]:
        largest = max(part.parameter_bytes for part in parts)
        units = max(part.num_units for part in parts)
        read = batch_to_ranks(self.machine, layout, self.costs.sample_bytes)
        return read | along_data(self.machine, layout, largest, units, num_gathers=1)

    def memory(self, layout: Layout) -> RankMemory:
        """Returns the memory of the fullest rank, of a layout with a partition."""
        batch = self.batch(layout)
        mesh, again = layout.mesh, self._sums_of(layout).recomputed_bytes
        kept, needs = batch.held_by_stages(layout.partition)
        if mesh.pp == 1:
            sizes = [layer.parameter_bytes for layer in batch.step.layers]
            is_plain = mesh.has_whole_model or mesh.data_size == 1
            shard_size = None if is_plain else mesh.dp_shard
            held = held_beside(self.costs, layout, sum(sizes), kept[0] + again, needs[0])
            return memory_of_whole(sizes, shard_size, held, num_replicas=mesh.data_size)
        found = []
        of_ranks = zip(self._parts(layout), self._flights(layout), strict=True)
        for rank, (part, flights) in enumerate(of_ranks):
            most = max(sum(n * kept[s] for s, n in counts) for counts in flights)
            need = max(needs[stage] for counts in flights for stage, _ in counts)
            sent = bytes_between_stages(layout, rank, self._boundary_bytes(layout))
            size, unit = part.parameter_bytes, part.largest_layer_bytes
            held = held_beside(self.costs, layout, size, most + again, need, sent)
            found.append(memory_of_part(size, layout, held, largest_unit=unit))
        return max(found, key=lambda memory: memory.peak)

    def _recomputed_bytes(self, layout: Layout) -> float:
        """Returns bytes of the largest layer that runs again in a backward."""
        if not layout.recomputes:
            return 0.0
        layers = self.batch(replace(layout, recomputes=False)).step.layers
        return max(max(0, layer.activation_bytes - layer.boundary_bytes) for layer in layers)

    def _flights(self, layout: Layout) -> list[Flights]:
        """Returns, for each rank, how many micro-batches are in flight on its stages at a time."""
        key = (layout.schedule, layout.mesh.pp, layout.stages_per_rank, layout.num_microbatches)
        if key not in self._in_flight:
            actions = self.schedule(layout).ranks
            self._in_flight[key] = [count_flights(own) for own in actions]
        return self._in_flight[key]

    def _inside_layers(self, layout: Layout) -> dict[str, Wait]:
        """Returns the wait of all layers of one micro-batch for tensor-parallel ranks."""
        if layout.mesh.tp == 1:
            return {}
        return inside_layers(self.machine, layout, self.costs.tensor[layout.mesh.tp])

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


@cache
def _splits_backwards(schedule: str) -> bool:
    few = build_schedule(schedule, num_stages=4, num_microbatches=2).ranks
    return any(a.kind is ActionKind.BACKWARD_INPUT for own in few for a in own)
