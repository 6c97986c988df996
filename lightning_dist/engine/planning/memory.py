"""How many bytes a rank needs to train, by kind, before any machine has been rented.

Integers in, integers out; no model is built. The activations are given, not computed: what a layer
keeps for its backward is the layer's own business, and easily measured on one process.

The worst moment is the end of the forward: all activations are there, and so are the gradients of
the step before, for Lightning zeroes them between forward and backward. A loop that zeroes them
before the forward needs less. Not counted: what an update or a checkpoint needs for a moment, whole
gradients that FSDP accumulates over micro-steps, and the libraries themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """What one rank would train if nobody shared it: the model, or a pipeline's stage.

    Attributes:
        parameter_bytes: Of all trainable parameters, whole.
        activation_bytes: The most that a forward and backward of one micro-batch hold beside
            parameters and their gradients.
        states_per_parameter: Tensors of a parameter's size that the optimizer keeps: 2 for Adam, 1
            for momentum, 0 for plain SGD.

    Raises:
        ValueError: A number below zero.
    """

    parameter_bytes: int
    activation_bytes: int = 0
    states_per_parameter: int = 2

    def __post_init__(self) -> None:
        """Checks the numbers."""
        numbers = (self.parameter_bytes, self.activation_bytes, self.states_per_parameter)
        if min(numbers) < 0:
            raise ValueError(f"{self}: none of these can be below zero.")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank at the worst moment of its training.

    Attributes:
        parameters: Its share.
        gradients: Of its share.
        optimizer_state: Of its share.
        activations: Of all micro-batches in flight.
        unsharded: Parameters of other ranks, gathered to compute with.
        buffers: What gradients are copied to on their way, beyond their own memory.
        stash: Older versions of the weights.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    unsharded: int = 0
    buffers: int = 0
    stash: int = 0

    @property
    def peak(self) -> int:
        """All kinds together."""
        return sum(getattr(self, field.name) for field in fields(self))


def replicated(part: TrainedPart, num_replicas: int, *, accumulates: bool = False) -> RankMemory:
    """Counts a rank of DDP.

    Its gradients are in the buckets that travel, but for those that are accumulated before.

    Args:
        part: The model.
        num_replicas: Ranks.
        accumulates: Whether an update has several batches.

    Raises:
        ValueError: There is no replica.
    """
    _check_ranks("num_replicas", num_replicas)
    return RankMemory(
        parameters=part.parameter_bytes,
        gradients=part.parameter_bytes,
        optimizer_state=part.states_per_parameter * part.parameter_bytes,
        activations=part.activation_bytes,
        buffers=part.parameter_bytes if num_replicas > 1 and accumulates else 0,
    )


def sharded(
    part: TrainedPart, shard_size: int, peak_whole_bytes: int, largest_unit_bytes: int
) -> RankMemory:
    """Counts a rank of FSDP; replicas of the shards (HSDP) change nothing.

    When the backward begins the shards of the old gradients are gone. Instead there are a unit's
    new gradient, whole, and the one before it, copied to be reduced. Two units may be more than a
    share of all.

    Args:
        part: The model.
        shard_size: Ranks that share it.
        peak_whole_bytes: The most that is gathered at a time:
            ``FSDPStrategy.describe().peak_whole_bytes``.
        largest_unit_bytes: The largest of ``describe().rows``, whole.

    Raises:
        ValueError: There is no rank.
    """
    _check_ranks("shard_size", shard_size)
    share = -(-part.parameter_bytes // shard_size)
    return RankMemory(
        parameters=share,
        gradients=share,
        optimizer_state=part.states_per_parameter * share,
        activations=part.activation_bytes,
        unsharded=peak_whole_bytes,
        buffers=max(0, 2 * largest_unit_bytes - share),
    )


def pipelined(
    stage: TrainedPart,
    num_microbatches_in_flight: int,
    num_versions: int = 1,
    version_bytes: int | None = None,
) -> RankMemory:
    """Counts a rank of a pipeline.

    Its backwards are over before Lightning zeroes the gradients of the step before, so that there
    are two sets of them.

    Args:
        stage: This rank's layers.
        num_microbatches_in_flight: Forwards whose backward is still to come.
        num_versions: Of the weights, the present one among them.
        version_bytes: Of each older one; None takes those of the parameters. Half precision has
            less.

    Raises:
        ValueError: There is no micro-batch, or no version.
    """
    _check_ranks("num_microbatches_in_flight", num_microbatches_in_flight)
    _check_ranks("num_versions", num_versions)
    each = stage.parameter_bytes if version_bytes is None else version_bytes
    return RankMemory(
        parameters=stage.parameter_bytes,
        gradients=2 * stage.parameter_bytes,
        optimizer_state=stage.states_per_parameter * stage.parameter_bytes,
        activations=num_microbatches_in_flight * stage.activation_bytes,
        stash=(num_versions - 1) * each,
    )


def _check_ranks(name: str, number: int) -> None:
    if number < 1:
        raise ValueError(f"{name}={number} must be at least 1.")
