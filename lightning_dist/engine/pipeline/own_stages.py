"""A rank's stages, from when they take the pipelined module's forward until they let go of it.

Layers may move meanwhile, so the stages are made anew then, and what is known of the earlier ones
goes on: this is who remembers it. Others hold this mapping, never its values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn
from typing_extensions import override

from lightning_dist.engine.pipeline.layer_profiler import LayerProfiler
from lightning_dist.engine.pipeline.seam import Seam
from lightning_dist.engine.pipeline.stage import Stage
from lightning_dist.engine.pipeline.stage_maker import StageMaker
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.shape import PipelineShape
from lightning_dist.engine.splitting.cut import stage_of_layers
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.remote_layers import WholeInSight
from lightning_dist.engine.splitting.whole_step import StepSeam, WholeStep
from lightning_dist.engine.stashing.staleness import UpdateReport


class OwnStages(Mapping[int, Stage]):
    """The stages by their number.

    Args:
        maker: Makes them.
        shape: Which part of which pipeline this is; the module has been cut so.
    """

    def __init__(self, maker: StageMaker, shape: PipelineShape) -> None:
        self.shape = shape
        self.maker = maker
        self._stages: dict[int, Stage] = {}
        self._earlier_peaks: dict[int, int] = {}
        self._seam: Seam | StepSeam | None = None
        self._attach()

    @override
    def __getitem__(self, number: int) -> Stage:
        return self._stages[number]

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self._stages)

    @override
    def __len__(self) -> int:
        return len(self._stages)

    @property
    def has_last(self) -> bool:
        """Whether whole steps run here."""
        return any(stage.is_last for stage in self.values())

    @property
    def peak_stash_bytes(self) -> dict[int, int]:
        """The most bytes of stashed weights, by stage."""
        return {
            number: max(stage.policy.peak_stash_bytes, self._earlier_peaks.get(number, 0))
            for number, stage in self.items()
        }

    @property
    def num_copies(self) -> tuple[int, ...]:
        """The most copies of its weights that each stage of the pipeline holds at a time."""
        return self.maker.num_copies(self.shape)

    @property
    def version_bytes(self) -> int:
        """What one more version of the weights takes, of all stages."""
        return sum(stage.policy.version_bytes for stage in self.values())

    @property
    def reports(self) -> dict[int, UpdateReport]:
        """What is known of the latest update, by stage; empty before the first."""
        return {n: stage.report for n, stage in self.items() if stage.report is not None}

    @property
    def staleness(self) -> dict[int, tuple[int, ...]]:
        """Updates between the weights of a batch and its update, for each update, by stage."""
        return {number: stage.meter.history for number, stage in self.items()}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Gives the trainable parameters by their names in the pipelined module."""
        return {n: p for stage in self.values() for n, p in stage.named_parameters().items()}

    def layer_profiler(self, recorder: Recorder) -> LayerProfiler:
        """Makes what times the layers while they train.

        Args:
            recorder: Of the rank that runs them.
        """
        stages = stage_of_layers(self.shape.layers_per_stage)
        parts = self.maker.found.parts()
        own = [part for part in parts if stages[part.layer_index] in self]
        return LayerProfiler(own, recorder, self.maker.half)

    @contextmanager
    def letting_go(self) -> Iterator[None]:
        """Leaves the pipelined module alone for a while; nothing may be in flight.

        Yields:
            Nothing. Meanwhile layers may move, if :meth:`take_over` follows, or another pipeline
            may run this rank's. What is known of weights goes on afterwards.
        """
        self.detach()
        yield
        self._attach()

    def take_over(self, layers_per_stage: tuple[int, ...]) -> None:
        """Notes another partition, while the module is let go.

        Args:
            layers_per_stage: By which the module is cut now.
        """
        assert self._seam is None
        self.shape = replace(self.shape, layers_per_stage=layers_per_stage)

    def detach(self) -> None:
        """Gives the pipelined module its forward back."""
        seam, self._seam = self._seam, None
        if seam is not None:
            seam.detach()
            self.maker.found.detach()
        for stage in self.values():
            stage.clear()

    def _attach(self) -> None:
        self._earlier_peaks = self.peak_stash_bytes
        known = self.staleness
        found = self.maker.found
        found.attach()
        seam = self._seam = self._make_seam(found)
        self._stages = {
            number: self.maker.make(self.shape, number, seam, known.get(number, ()))
            for number in self.shape.stages
        }

    def _make_seam(self, found: Layers) -> Seam | StepSeam:
        if isinstance(found, WholeStep):
            return StepSeam()
        sight = WholeInSight(found, self.maker.device)
        return Seam(found.module, sight, is_whole=self.shape.num_stages == 1)
