"""The bytes that a rank needs to train, by kind, before any machine has been rented.

Integers in, integers out; no model is built. The activations are given, not computed: only a layer
knows what its backward needs, and one process can easily measure that.

The worst moment is the end of the forward. Then all activations are there, and the gradients of the
step before, which Lightning zeroes between forward and backward. A loop that zeroes gradients
before the forward needs less. A pipeline runs backwards while it has activations, so the strategies
drop the old gradients ahead of a batch. Not counted: temporary memory of an update or a checkpoint,
whole gradients that FSDP accumulates over micro-steps, and the libraries themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lightning_dist.engine.common.names import check_count


@dataclass(frozen=True, slots=True)
class TrainedPart:
    """The model, or a pipeline's stage, that a rank would train without sharding.

    Attributes:
        parameter_bytes: Bytes of all trainable parameters, unsharded.
        activation_bytes: Largest number of bytes that a forward and backward of one micro-batch
            hold besides parameters and their gradients.
        states_per_parameter: Tensors of a parameter's size that the optimizer keeps: 2 for Adam, 1
            for momentum, 0 for plain SGD.

    Raises:
        ValueError: A number is below zero.
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
        parameters: Bytes of the rank's shard of the parameters; a plan's, with buffers.
        gradients: Bytes of the shard's gradients.
        optimizer_state: Bytes of the shard's optimizer state.
        activations: Bytes of the activations of all micro-batches in flight.
        unsharded: Bytes of gathered parameters of other ranks.
        buffers: Bytes of copies of gradients for communication.
        stash: Bytes of older versions of the weights.
        temporary: Bytes of tensors that are there for a moment only, beyond those of other moments.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    unsharded: int = 0
    buffers: int = 0
    stash: int = 0
    temporary: int = 0

    @property
    def peak(self) -> int:
        """Bytes of all kinds together."""
        return sum(getattr(self, field.name) for field in fields(self))


def replicated(part: TrainedPart, num_replicas: int, *, accumulates: bool = False) -> RankMemory:
    """Returns the memory of a DDP rank.

    Gradients are in the buckets that are all-reduced, but for accumulated gradients.

    Args:
        part: The model.
        num_replicas: Number of ranks.
        accumulates: Whether an update has several batches.

    Raises:
        ValueError: There is no replica.
    """
    check_count("num_replicas", num_replicas)
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
    """Returns the memory of an FSDP rank; replicas of the shards (HSDP) change nothing.

    When the backward begins, the shards of the old gradients are gone. Instead there are a unit's
    new unsharded gradient, and a copy of the previous unit's for the reduce-scatter. Two units may
    be more than a rank's shard of the model.

    Args:
        part: The model.
        shard_size: Number of ranks that shard the model.
        peak_whole_bytes: Largest number of gathered bytes at a time:
            ``FSDPStrategy.describe().peak_whole_bytes``.
        largest_unit_bytes: Unsharded bytes of the largest of ``describe().rows``.

    Raises:
        ValueError: There is no rank.
    """
    check_count("shard_size", shard_size)
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
    """Returns the memory of a pipeline's rank.

    Args:
        stage: This rank's layers.
        num_microbatches_in_flight: Number of forwards whose backward is still to come.
        num_versions: Number of versions of the weights, the present one included.
        version_bytes: Bytes of each older version, fewer in half precision; None takes the
            parameters' bytes.

    Raises:
        ValueError: There is no micro-batch, or no version.
    """
    check_count("num_microbatches_in_flight", num_microbatches_in_flight)
    check_count("num_versions", num_versions)
    each = stage.parameter_bytes if version_bytes is None else version_bytes
    return RankMemory(
        parameters=stage.parameter_bytes,
        gradients=stage.parameter_bytes,
        optimizer_state=stage.states_per_parameter * stage.parameter_bytes,
        activations=num_microbatches_in_flight * stage.activation_bytes,
        stash=(num_versions - 1) * each,
    )
