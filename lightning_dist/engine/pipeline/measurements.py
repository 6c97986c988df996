"""The measurements of all ranks of a pipeline, and the planner's prediction of a rank's memory.

Measurements are gathered once, at the end of a training, so that no step waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.planning.memory import RankMemory, TrainedPart, pipelined
from lightning_dist.engine.schedules.timeline import PackedSpans, Span, Timeline


@dataclass(frozen=True, slots=True)
class Measurements:
    """The measurements of a training that has ended.

    Attributes:
        stretches: Each rank's spans by stretch; stretches have the same numbers on all ranks.
        peak_stash_bytes: The most bytes of stashed weights, by stage.
        staleness: Updates between the weights of a batch and its update, for each update, by stage.
    """

    stretches: Sequence[Mapping[int, Sequence[Span]]] = ()
    peak_stash_bytes: tuple[int, ...] = ()
    staleness: tuple[tuple[int, ...], ...] = ()

    @property
    def timeline(self) -> Timeline:
        """All spans of all ranks, the first at zero."""
        spans = (s for by_stretch in self.stretches for part in by_stretch.values() for s in part)
        return Timeline(len(self.stretches), tuple(spans)).shifted_to_zero()

    @property
    def steady_timeline(self) -> Timeline:
        """The longest stretch, from the last rank's begin to the first rank's end."""
        if not self.stretches or not all(self.stretches):
            return self.timeline
        common = set.intersection(*(set(by_stretch) for by_stretch in self.stretches))
        longest = max(common, key=lambda number: len(self.stretches[0][number]), default=None)
        if longest is None:
            return self.timeline
        parts = [by_stretch[longest] for by_stretch in self.stretches]
        begin = max(part[0].start_seconds for part in parts)
        end = min(part[-1].end_seconds for part in parts)
        spans = tuple(span for part in parts for span in part)
        return Timeline(len(parts), spans).between(begin, end).shifted_to_zero()


class MeasuredStages:
    """A strategy's measurements of a training that has ended; empty before its end."""

    _measurements: Measurements = Measurements()

    @property
    def timeline(self) -> Timeline:
        """The spans of all ranks."""
        return self._measurements.timeline

    @property
    def steady_timeline(self) -> Timeline:
        """The longest part of :attr:`timeline` without fill, drain or validation."""
        return self._measurements.steady_timeline

    @property
    def peak_stash_bytes(self) -> tuple[int, ...]:
        """The most bytes of stashed weights on each stage."""
        return self._measurements.peak_stash_bytes

    @property
    def staleness(self) -> tuple[tuple[int, ...], ...]:
        """By stage, for each update, the age of its batch's weights in updates."""
        return self._measurements.staleness


def gather_measurements(
    pipeline: Pipeline, group: dist.ProcessGroup, mesh: MeshShape
) -> Measurements:
    """Gathers all ranks' measurements over a gloo group. Collective: every rank must call it."""
    own_stages = pipeline.stages
    stages = {s: (own_stages.peak_stash_bytes[s], own_stages.staleness[s]) for s in own_stages}
    spans = {n: PackedSpans(part) for n, part in pipeline.recorder.stretches().items()}
    gathered = gather_objects((spans, stages), group)
    of_stages: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank, (_, by_stage) in enumerate(gathered):
        of_stages |= {} if mesh.data_index(rank) else by_stage
    in_order = [of_stages[stage] for stage in sorted(of_stages)]
    return Measurements(
        [stretches for stretches, _ in gathered],
        tuple(peak_stash_bytes for peak_stash_bytes, _ in in_order),
        tuple(staleness for _, staleness in in_order),
    )


def predict_memory(pipeline: Pipeline, part: TrainedPart) -> RankMemory:
    """Returns the planner's prediction of the memory of a rank's stages."""
    shape, stages = pipeline.shape, pipeline.stages
    in_flight = shape.build(only_rank=shape.rank).in_flight(shape.rank)
    copies = max(stages.num_copies[stage] for stage in stages)  # none where there are several
    return pipelined(part, in_flight, 1 + copies, stages.version_bytes)
