"""The user's configuration of a pipeline, its checks, and the values derived from it.

It is in this package, below ``engine.pipeline`` and ``engine.parallelize``, since the cut needs it,
and ``parallelize`` asks for the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # the base of all of them has no public name
from torch.optim import Optimizer

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import check_choice, check_count
from lightning_dist.engine.schedules.family import ScheduleFamily
from lightning_dist.engine.schedules.registry import PipelineShape, find_family
from lightning_dist.engine.schedules.update_rule import UpdateRule, WeightVersions
from lightning_dist.engine.stashing.learning_rates import RateCorrection
from lightning_dist.engine.stashing.policy import Predict
from lightning_dist.engine.stashing.prediction import check_extrapolation, extrapolated

StalenessCorrection = Literal["none", "lr", "predict"]
Transport = Literal["auto", "gloo", "p2p"]
_MICROBATCHES_PER_RANK = 4

# The names for the command line's help; a string may also be "file:" and a path.
ScheduleName = (
    Literal[
        "gpipe",
        "1f1b",
        "interleaved_1f1b",
        "looped_bfs",
        "zb_h1",
        "zbv",
        "pipedream",
        "pipedream_2bw",
    ]
    | str
)


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class PipelineConfig:
    """The arguments of :class:`~lightning_dist.PipelineStrategy` of the same names.

    Attributes:
        schedule: Name of the schedule.
        num_microbatches: Pieces of each Lightning batch.
        layers: ``"auto"``, or the dotted path of an ``nn.Sequential`` or ``nn.ModuleList`` of
            layers; or ``"trace"``, or ``"trace:"`` and the path of the pipelined module.
        partition: Name of the rule that cuts the module, or the layers per stage.
        weight_versions: Weights with which an asynchronous backward computes.
        stages_per_rank: Stages on each rank; ``"auto"`` takes the fewest that the schedule needs.
        staleness_correction: ``"lr"`` trains stale stages with smaller rates at first;
            ``"predict"`` runs forwards with extrapolated weights.
        correction_steps: Updates until all stages train with the full rate.
        transport: How tensors travel between stages.

    Raises:
        ValueError: An argument is unknown, too small, or excludes another one.
    """

    schedule: ScheduleName = "1f1b"
    num_microbatches: int | Literal["auto"] = "auto"
    layers: str = "auto"
    partition: Literal["parameters", "uniform", "profile"] | Sequence[int] = "parameters"
    weight_versions: WeightVersions = "stash"
    stages_per_rank: int | Literal["auto"] = "auto"
    staleness_correction: StalenessCorrection = "none"
    correction_steps: int = 1000
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        """Checks the arguments."""
        for name, example in (("schedule", "1f1b"), ("layers", "auto")):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"{name}={value!r} must be a string, like {example!r}.")
        rule = self.family.update_rule
        check_choice("weight_versions", self.weight_versions, get_args(WeightVersions))
        if self.weight_versions != "stash" and rule.is_asynchronous and rule.is_joint:
            raise ValueError(
                f"weight_versions={self.weight_versions!r} does not go with schedule="
                f"{self.schedule!r}, which gives each batch the same version on all stages anyway."
                " Leave it at 'stash'."
            )
        if self.num_microbatches != "auto":
            check_count("num_microbatches", self.num_microbatches, instead="'auto'")
        if self.stages_per_rank != "auto":
            check_count("stages_per_rank", self.stages_per_rank, instead="'auto'")
        if not rule.splits_batches and self.num_microbatches not in ("auto", 1):
            raise ValueError(
                f"num_microbatches={self.num_microbatches} does not go with schedule="
                f"{self.schedule!r}, which takes each Lightning batch as one micro-batch. Leave it"
                " at 'auto' and use smaller batches, or use schedule='1f1b'."
            )
        self._check_correction(rule)
        check_choice("transport", self.transport, get_args(Transport))
        is_name = isinstance(self.partition, str)
        is_rule = is_name and self.partition in ("parameters", "uniform", "profile")
        if not is_rule and not _are_counts(self.partition):
            raise ValueError(
                f"partition={self.partition!r} must be 'parameters', 'uniform', 'profile' or the"
                " layers per stage, each of them an integer of at least 1, like [3, 3]."
            )

    def _check_correction(self, rule: UpdateRule) -> None:
        check_count("correction_steps", self.correction_steps)
        check_choice(
            "staleness_correction", self.staleness_correction, get_args(StalenessCorrection)
        )
        if self.staleness_correction != "none" and not rule.is_asynchronous:
            raise ValueError(
                f"staleness_correction={self.staleness_correction!r} does not go with schedule="
                f"{self.schedule!r}, under which no weights are stale. Leave it at 'none'."
            )
        if self.staleness_correction == "lr" and rule.is_joint:
            raise ValueError(
                "staleness_correction='lr' does not go with schedule="
                f"{self.schedule!r}: it makes up for a staleness that differs from stage to stage,"
                " and here it is the same on each. Use 'predict', or leave it at 'none'."
            )
        if self.staleness_correction == "predict" and self.weight_versions != "stash":
            raise ValueError(
                f"staleness_correction='predict' does not go with weight_versions="
                f"{self.weight_versions!r}: it makes versions of its own. Leave that at 'stash'."
            )

    def rate_correction(self, shape: PipelineShape) -> RateCorrection | None:
        """Returns the correction of a rank's learning rate; None without one."""
        if self.staleness_correction != "lr":
            return None
        rule, sizes = self.family.update_rule, (shape.num_ranks, shape.num_microbatches)
        age = rule.weights(self.weight_versions, shape.rank, *sizes).age
        return RateCorrection(rule.delay(shape.rank, *sizes) + age, self.correction_steps)

    def prediction(self, optimizer: Optimizer | None) -> Predict | None:
        """Returns the function that extrapolates a rank's weights for forwards; None without one.

        Raises:
            ValueError: The optimizer's updates cannot be extrapolated.
        """
        if self.staleness_correction != "predict" or optimizer is None:
            return None
        check_extrapolation(optimizer)
        return partial(extrapolated, optimizer)

    def p2p_backend(self, backend: str, device: torch.device) -> str | None:
        """Returns the backend that sends tensors between stages; None packs them for gloo.

        Raises:
            ValueError: The backend of the process groups sends no tensors of the device.
        """
        is_gloo = backend == "gloo"
        if self.transport == "p2p" and is_gloo and device.type != "cpu":
            raise ValueError(
                f"transport='p2p' does not go with process_group_backend='gloo' on {device.type},"
                " whose tensors gloo does not send. Use transport='gloo', which packs them in host"
                " memory, or leave `process_group_backend` at None."
            )
        return (
            None if self.transport == "gloo" or (self.transport == "auto" and is_gloo) else backend
        )

    @property
    def family(self) -> ScheduleFamily:
        """The family of the schedule."""
        return find_family(self.schedule)

    @property
    def is_traced(self) -> bool:
        """Whether the layers are found by tracing a module."""
        return self.layers.partition(":")[0] == "trace"

    @property
    def asynchronous(self) -> bool:
        """Whether batches overlap, so that weights are stale."""
        return self.family.update_rule.is_asynchronous

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        """Returns the rank of each stage.

        Raises:
            ValueError: The schedule takes other numbers of stages or micro-batches.
        """
        per_rank = None if self.stages_per_rank == "auto" else self.stages_per_rank
        found = self.family.rank_of_stage(num_ranks, per_rank)
        self.family.check_microbatches(num_ranks, self.training_microbatches(num_ranks))
        return found

    def training_microbatches(self, num_ranks: int) -> int:
        """Returns the number of micro-batches of a training batch on so many ranks."""
        if self.num_microbatches != "auto":
            return self.num_microbatches
        return self.family.default_microbatches(num_ranks)

    def evaluation_microbatches(self, num_ranks: int) -> int:
        """Returns the number of micro-batches of a batch that runs forward only."""
        if self.asynchronous and num_ranks > 1 and self.num_microbatches == "auto":
            return _MICROBATCHES_PER_RANK * num_ranks  # or all ranks but one would idle
        return self.training_microbatches(num_ranks)

    def shape(self, mesh: MeshShape, rank: int, layers_per_stage: tuple[int, ...]) -> PipelineShape:
        """Returns a rank's part of its pipeline."""
        return PipelineShape(
            self.schedule,
            self.training_microbatches(mesh.pp),
            layers_per_stage,
            mesh.coordinates(rank)["pp"],
            stages_per_rank=len(layers_per_stage) // mesh.pp,
            keeps_pairs=self.num_microbatches == "auto",
            replica_index=mesh.data_index(rank),
        )


def _are_counts(partition: object) -> bool:
    return (
        isinstance(partition, Sequence)
        and len(partition) > 0
        and all(isinstance(count, Integral) and int(count) >= 1 for count in partition)
    )


def share_among_stages(
    world_size: int, num_stages: int | Literal["auto"], config: PipelineConfig
) -> MeshShape:
    """Returns the mesh of stages and data replicas; ``"auto"`` makes all ranks one pipeline.

    Raises:
        ValueError: The stages do not divide the ranks, or the schedule does not allow the sizes.
    """
    if num_stages == "auto":
        config.rank_of_stage(world_size)
        return MeshShape(pp=world_size)
    per_rank = None if config.stages_per_rank == "auto" else config.stages_per_rank
    num_ranks = config.family.num_ranks(num_stages, per_rank)
    config.rank_of_stage(num_ranks)
    if world_size % num_ranks:
        above = num_ranks * (world_size // num_ranks + 1)
        choices = f"{above - num_ranks} or {above}" if world_size > num_ranks else f"{above}"
        takes = f"{num_ranks} ranks" + (
            "" if num_ranks == num_stages else f" of {num_stages // num_ranks} stages"
        )
        raise ValueError(
            f"The world size ({world_size}) must be a multiple of num_stages={num_stages}: each"
            f" data replica takes {takes}. Use {choices} devices in all, or another"
            " `num_stages`."
        )
    return MeshShape(pp=num_ranks, dp_replicate=world_size // num_ranks)


def find_batch_statistics(module: nn.Module, *, in_any_mode: bool = False) -> tuple[str, ...]:
    """Lists the modules that would compute statistics of a training batch, with their classes.

    BatchNorm in training mode normalises a sample by all samples of its call. A micro-batch has
    fewer, so a batch in micro-batches trains another model than the same batch on one device.

    Args:
        module: The whole model, in the mode in which it trains.
        in_any_mode: Whether it is in another mode now.
    """
    return tuple(
        f"{name} ({type(part).__name__})"
        for name, part in module.named_modules()
        if isinstance(part, _BatchNorm) and (in_any_mode or part.training)
    )


def with_whole_batches(config: PipelineConfig, num_ranks: int) -> PipelineConfig:
    """Returns the configuration with one micro-batch, if it says ``"auto"`` and that can be."""
    if config.num_microbatches != "auto":
        return config
    whole = replace(config, num_microbatches=1)
    try:
        whole.rank_of_stage(num_ranks)
    except ValueError:  # the schedule needs more
        return config
    return whole
