"""What is compared: ways to train a pipeline, optimizers, numbers of stages, rates and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from lightning_dist.engine.splitting.config import PipelineConfig, StalenessCorrection
from lightning_dist.engine.stashing.policy import WeightVersions


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train a pipeline.

    Attributes:
        name: In the table.
        schedule: Of :class:`~lightning_dist.PipelineStrategy`, like the next two.
        weight_versions: Which weights a backward sees.
        staleness_correction: What is done against staleness.
        trained_stages: Stages to train with where the weights do not depend on their number: a
            synchronous schedule computes what one device does, ``pipedream_2bw`` is one update
            late for any number. None trains with the number in question.
    """

    name: str
    schedule: str
    weight_versions: WeightVersions = "stash"
    staleness_correction: StalenessCorrection = "none"
    trained_stages: int | None = None

    @property
    def predicts(self) -> bool:
        """Whether it must know where the optimizer goes."""
        return self.staleness_correction == "predict"

    def config(self, correction_steps: int) -> PipelineConfig:
        """Gives the strategy's arguments.

        Args:
            correction_steps: Updates until all stages train with the full rate.
        """
        return PipelineConfig(
            self.schedule,
            weight_versions=self.weight_versions,
            staleness_correction=self.staleness_correction,
            correction_steps=correction_steps,
        )


SYNC = Method("sync", "1f1b", trained_stages=1)
TWO_VERSIONS = Method("2bw", "pipedream_2bw", trained_stages=2)
METHODS = (
    SYNC,
    Method("pipedream", "pipedream"),
    Method("no stash", "pipedream", weight_versions="none"),
    Method("vertical sync", "pipedream", weight_versions="vertical_sync"),
    Method("lr", "pipedream", staleness_correction="lr"),
    Method("predict", "pipedream", staleness_correction="predict"),
    TWO_VERSIONS,
    Method("2bw, predict", "pipedream_2bw", staleness_correction="predict", trained_stages=2),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One training.

    Attributes:
        method: How.
        optimizer: Name of the optimizer.
        num_stages: Stages that it trains with.
        rate_factor: Multiplies the optimizer's learning rate.
        seed: Of the initial weights and the order of the text.
    """

    method: Method
    optimizer: str
    num_stages: int
    rate_factor: float
    seed: int

    def __str__(self) -> str:
        """Names the trial for people."""
        return (
            f"{self.optimizer} {self.method.name} on {self.num_stages} stages,"
            f" rate x {self.rate_factor:g}, seed {self.seed}"
        )


def trials(
    optimizers: Iterable[str],
    methods: Sequence[Method],
    stages: Sequence[int],
    rate_factors: Sequence[float],
    seeds: Sequence[int],
) -> Iterator[Trial]:
    """Lists what has to be trained, each once.

    Args:
        optimizers: Names.
        methods: Ways to train.
        stages: Numbers of stages.
        rate_factors: Of the learning rate.
        seeds: Of the repetitions.
    """
    for seed, factor, optimizer, method in product(seeds, rate_factors, optimizers, methods):
        if optimizer == "muon" and method.predicts:
            continue  # nobody knows where Muon goes
        for count in stages if method.trained_stages is None else (method.trained_stages,):
            yield Trial(method, optimizer, count, factor, seed)
