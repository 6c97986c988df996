"""The trials to compare: methods, optimizers, numbers of ranks, rates and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from lightning_dist.engine.data_parallel.local_config import LocalConfig, OuterOptimizer
from lightning_dist.engine.schedules.update_rule import WeightVersions
from lightning_dist.engine.splitting.config import PipelineConfig, StalenessCorrection


@dataclass(frozen=True, slots=True)
class Method:
    """One way to train on several ranks: a pipeline's, or that of replicas.

    Attributes:
        name: Name in the table.
        schedule: The ``schedule`` of :class:`~lightning_dist.PipelineStrategy`.
        weight_versions: The strategy's ``weight_versions``: which weights a backward uses.
        staleness_correction: The strategy's ``staleness_correction``.
        trained_stages: Number of stages to train with, if the weights do not depend on it: a
            synchronous schedule computes the same as one device, and ``pipedream_2bw`` is one
            update late for any number. None trains with the number in question.
        local: How replicas step by themselves, one on each rank; None for a pipeline.
        has_server: Whether a parameter server steps on the gradient of each rank as it comes.
    """

    name: str
    schedule: str
    weight_versions: WeightVersions = "stash"
    staleness_correction: StalenessCorrection = "none"
    trained_stages: int | None = None
    local: LocalConfig | None = None
    has_server: bool = False

    @property
    def predicts(self) -> bool:
        """Whether the method must predict the optimizer's updates."""
        return self.staleness_correction == "predict"

    @property
    def is_pipeline(self) -> bool:
        """Whether the ranks are stages."""
        return self.local is None and not self.has_server

    def config(self, correction_steps: int) -> PipelineConfig:
        """Returns the strategy's arguments.

        Args:
            correction_steps: Updates until all stages train with the full rate.
        """
        return PipelineConfig(
            self.schedule,
            weight_versions=self.weight_versions,
            staleness_correction=self.staleness_correction,
            correction_steps=correction_steps,
        )


ROUNDS = (5, 20)
"""Updates from one average of the replicas' weights to the next."""
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
    Method("server", "1f1b", has_server=True),
    *(Method(f"local sgd, {h}", "1f1b", local=LocalConfig(h)) for h in ROUNDS),
    *(Method(f"diloco, {h}", "1f1b", local=LocalConfig(h, outer=OuterOptimizer())) for h in ROUNDS),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """One training.

    Attributes:
        method: The method.
        optimizer: Name of the optimizer.
        num_stages: Number of stages to train with.
        rate_factor: Factor of the optimizer's learning rate.
        seed: Seed of the initial weights and the order of the text.
    """

    method: Method
    optimizer: str
    num_stages: int
    rate_factor: float
    seed: int

    def __str__(self) -> str:
        """Returns a name of the trial for people."""
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
    """Yields the trials to train, each once.

    Args:
        optimizers: Names of the optimizers.
        methods: Ways to train.
        stages: Numbers of stages.
        rate_factors: Factors of the learning rate.
        seeds: Seeds of the repetitions.
    """
    for seed, factor, optimizer, method in product(seeds, rate_factors, optimizers, methods):
        if optimizer == "muon" and method.predicts:
            continue  # no formula predicts Muon's updates
        for count in stages if method.trained_stages is None else (method.trained_stages,):
            yield Trial(method, optimizer, count, factor, seed)
