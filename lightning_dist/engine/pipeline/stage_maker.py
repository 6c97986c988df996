"""How a rank makes its stages; the same way again when it gets other layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_dist.engine.pipeline.gradients import Gradients
from lightning_dist.engine.pipeline.seam import Seam
from lightning_dist.engine.pipeline.stage import Stage
from lightning_dist.engine.schedules.schedules import find_schedules
from lightning_dist.engine.schedules.shape import PipelineShape
from lightning_dist.engine.schedules.stash_depth import num_copies
from lightning_dist.engine.splitting.cut import layers_of
from lightning_dist.engine.splitting.layers import Layers
from lightning_dist.engine.splitting.whole_step import StepSeam
from lightning_dist.engine.stashing.half_versions import HalfWeights
from lightning_dist.engine.stashing.policy import Predict, WeightVersions, choose_policy
from lightning_dist.engine.stashing.staleness import StalenessMeter


@dataclass(frozen=True, slots=True)
class StageMaker:
    """Makes stages; all but the first attribute are as for ``Pipeline``.

    Attributes:
        found: The layers of the pipelined module.
        weight_versions: Which weights a backward sees.
        seed: Base of the random numbers.
        device: Where the stage computes.
        layers: Gives what runs a stage's layers; None runs them one after the other.
        gradients: Makes what holds a stage's.
        predict: Gives copies of parameters as they will be.
        measure_discrepancy: Whether to say how far weights have moved.
        half: How layers compute in half precision.
    """

    found: Layers
    weight_versions: WeightVersions
    seed: int
    device: torch.device
    layers: Callable[[int], nn.Module] | None
    gradients: Callable[[int], Gradients]
    predict: Predict | None
    measure_discrepancy: bool
    half: HalfWeights | None

    def num_copies(self, shape: PipelineShape) -> tuple[int, ...]:
        """Counts the most copies of its weights that each stage of a pipeline holds.

        Args:
            shape: Of the pipeline.
        """
        return num_copies(shape, self.weight_versions, predicts=self.predict is not None)

    def make(
        self, shape: PipelineShape, number: int, seam: Seam | StepSeam, history: Sequence[int] = ()
    ) -> Stage:
        """Makes a stage on the layers that are here.

        Args:
            shape: Of the pipeline.
            number: Of the stage, one of the rank's.
            seam: Where the user's step calls it.
            history: The staleness of the updates that it has made so far.
        """
        own = layers_of(self.found, shape.layers_per_stage, number)
        gradients = self.gradients(number)
        policy = choose_policy(
            own,
            number,
            find_schedules(shape.schedule).update_rule,
            self.weight_versions,
            self.predict,
            self.measure_discrepancy,
            self.half,
            shape.num_microbatches,
            hides_hooks=not gradients.runs_hooks,
        )
        return Stage(
            seam,
            number,
            shape.num_stages,
            own if self.layers is None else self.layers(number),
            policy,
            gradients,
            StalenessMeter(policy.release, history, measures_discrepancy=self.measure_discrepancy),
            layer_input=self.found.layer_input,
            seed=(self.seed, shape.replica_index),
            device=self.device,
            root=self.found.users_module,
        )
