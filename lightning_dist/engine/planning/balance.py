"""The distance of a partition from the best one, in seconds per training step.

A partition is judged by the step that the simulator predicts, not by its slowest stage alone. With
few micro-batches much of a step is filling and draining, and a better balance buys less. A better
partition also has to fit into memory, some of which depends on the schedule: the activations of
each micro-batch in flight, and older versions of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.engine.common.table import Table, format_bytes
from lightning_dist.engine.planning.layer_costs import LayerCosts, StepCosts
from lightning_dist.engine.planning.partition import MemoryLimit, stage_of_layers
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.simulator import simulate


@dataclass(frozen=True, slots=True)
class Balance:
    """A partition and the best one, by measured costs; as text, two tables.

    Attributes:
        costs: Costs of the layers and of the rest of a step.
        cut: Layers per stage now.
        better_cut: Layers per stage in the better partition; the same if there is no gain.
        step_seconds: Predicted time of a training batch with ``cut``.
        better_step_seconds: Predicted time of a training batch with ``better_cut``.
        measured_step_seconds: Measured time of a training batch; nan if it was not measured.
        batches: The first and the last measured training batch; None if they are unknown.
    """

    costs: StepCosts
    cut: tuple[int, ...]
    better_cut: tuple[int, ...]
    step_seconds: float
    better_step_seconds: float
    measured_step_seconds: float = float("nan")
    batches: tuple[int, int] | None = None

    @property
    def measured_in(self) -> str:
        """The text on the measured batches after a title; empty if they are unknown."""
        return "" if self.batches is None else ", batches {} to {}".format(*self.batches)

    @property
    def gain(self) -> float:
        """Share of a step's time that the better partition would save."""
        return 1.0 - self.better_step_seconds / self.step_seconds if self.step_seconds else 0.0

    def stage_seconds(self, cut: tuple[int, ...]) -> tuple[float, ...]:
        """Returns the time that each stage of a cut spends on a micro-batch."""
        costs = self.costs.of_stages(cut)
        pairs = zip(costs.forward_seconds, costs.backward_seconds, strict=True)
        return tuple(forward + backward for forward, backward in pairs)

    def __str__(self) -> str:
        """Returns the tables of the layers and of the stages as text."""
        return f"{self.layer_table}\n\n{self.stage_table}"

    @property
    def layer_table(self) -> Table:
        """The table of each layer's costs, present stage and better stage."""
        stages = zip(stage_of_layers(self.cut), stage_of_layers(self.better_cut), strict=True)
        rows = [
            (
                layer.name,
                *map(str, now_and_then),
                f"{layer.forward_seconds * 1e3:.2f} ms",
                f"{layer.backward_seconds * 1e3:.2f} ms",
                format_bytes(layer.boundary_bytes),
                format_bytes(layer.activation_bytes),
            )
            for layer, now_and_then in zip(self.costs.layers, stages, strict=True)
        ]
        headings = ("layer", "stage", "better", "forward", "backward", "sends", "keeps")
        title = f"Layers, per micro-batch{self.measured_in}"
        return Table(title, headings, tuple(rows), right=frozenset(range(1, 7)))

    @property
    def stage_table(self) -> Table:
        """The table that compares the partition with the better one."""
        rows = []
        for name, cut, step in (
            ("today", self.cut, self.step_seconds),
            ("better", self.better_cut, self.better_step_seconds),
        ):
            seconds = self.stage_seconds(cut)
            rows.append(
                (
                    name,
                    ", ".join(map(str, cut)),
                    f"{max(seconds) * 1e3:.2f} ms",
                    f"{sum(seconds) / len(seconds) * 1e3:.2f} ms",
                    f"{step * 1e3:.2f} ms",
                )
            )
        headings = ("cut", "layers per stage", "slowest stage", "mean stage", "step")
        return Table(
            f"Stages{self.measured_in}", headings, tuple(rows), right=frozenset(range(2, 5))
        )


def find_balance(
    costs: StepCosts,
    shape: PipelineShape,
    memory: MemoryLimit | None = None,
) -> Balance:
    """Compares a pipeline's partition with the best one.

    Args:
        costs: Measured costs.
        shape: Shape of the present pipeline.
        memory: Limit that no stage of the better partition may exceed.

    Raises:
        ValueError: The costs are of another number of layers than the pipeline's, or no partition
            fits into the memory.
    """
    cut = shape.layers_per_stage
    if len(costs.layers) != sum(cut):
        raise ValueError(
            f"The costs are those of {len(costs.layers)} layers, but the cut {list(cut)} is one of"
            f" {sum(cut)}."
        )
    today = step_seconds(costs, shape, cut)
    others = [costs.best_cut(len(cut), memory)]
    even = costs.evened_out(others[0], shape.rank_of_stage)
    if memory is None or memory.fits(even):
        others.append(even)
    then, best = min((step_seconds(costs, shape, other), other) for other in others)
    if then >= today:
        best, then = cut, today
    return Balance(costs, cut, best, step_seconds=today, better_step_seconds=then)


def step_seconds(costs: StepCosts, shape: PipelineShape, cut: tuple[int, ...]) -> float:
    """Predicts the time of a training batch with a cut in place of the shape's own."""
    of_stages = costs.of_stages(cut)
    if not shape.family.update_rule.is_asynchronous:
        return simulate(shape.build(1), of_stages).makespan_seconds + costs.update_seconds
    # Ranks wait only for the slowest rank, which never waits.
    busy = [costs.update_seconds] * shape.num_ranks
    for stage, rank in enumerate(shape.rank_of_stage):
        seconds = of_stages.forward_seconds[stage] + of_stages.backward_seconds[stage]
        busy[rank] += shape.num_microbatches * seconds
    return max(busy)


def memory_limit(
    layers: Sequence[LayerCosts],
    shape: PipelineShape,
    num_copies: Sequence[int],
    cap_bytes: float,
) -> MemoryLimit:
    """Creates the memory limit of a pipeline's stages.

    Args:
        layers: Costs of the layers, in order.
        shape: Shape of the pipeline.
        num_copies: Copies of the weights on each stage; see :func:`.num_copies`.
        cap_bytes: Limit of each rank, which its stages share equally.
    """
    schedule = shape.build()
    return MemoryLimit(
        cap_bytes=cap_bytes / shape.stages_per_rank,
        resident_bytes=[layer.resident_bytes for layer in layers],
        flight_bytes=[layer.activation_bytes for layer in layers],
        in_flight=[schedule.in_flight(rank, s) for s, rank in enumerate(shape.rank_of_stage)],
        copy_bytes=[layer.version_bytes for layer in layers],
        num_copies=num_copies,
    )
