"""The links between ranks: what the study's messages cost, and when a loss is reached over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_dist.engine.planning.collectives import fastest
from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.planning.traffic import MessageKind

_FLOAT_BYTES = 4
_FLOPS_PER_PARAMETER = 6
"""Of a token, in forward and backward."""


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a training, in its own unit of time.

    Attributes:
        link: The link of each rank.
        batch_seconds: Seconds that one device takes for a batch.
        weight_bytes: Bytes of the model's weights.
        activation_bytes: Bytes of a batch between two stages.
    """

    link: Link
    batch_seconds: float
    weight_bytes: int
    activation_bytes: int

    @classmethod
    def of(
        cls, link: Link, flops: float, num_parameters: int, batch_tokens: int, width: int
    ) -> Network:
        """Creates the network of a training.

        Args:
            link: The link of each rank.
            flops: Operations of one device in a second.
            num_parameters: Of the model.
            batch_tokens: Tokens of a batch.
            width: Numbers of a token between two stages.
        """
        return cls(
            link,
            _FLOPS_PER_PARAMETER * num_parameters * batch_tokens / flops,
            _FLOAT_BYTES * num_parameters,
            _FLOAT_BYTES * batch_tokens * width,
        )

    def transfer(self, num_microbatches: int) -> float:
        """Returns the time of a micro-batch between two stages, in batches of one device."""
        return self.link.seconds(self.activation_bytes / num_microbatches) / self.batch_seconds

    def average(self, num_replicas: int) -> float:
        """Returns the time of an all-reduce of the weights, in batches of one device."""
        kind = MessageKind.ALL_REDUCE
        best = fastest(kind, num_replicas, self.weight_bytes, self.link)
        return best.seconds(num_replicas, self.weight_bytes, self.link) / self.batch_seconds


def updates_until(target: float, updates: Sequence[int], losses: Sequence[float]) -> int | None:
    """Returns after how many updates a loss is reached, between two looks in proportion.

    Args:
        target: The loss.
        updates: Number of updates at each look.
        losses: The loss at each look.

    Returns:
        The number of updates; None if no look reaches the loss.
    """
    before: tuple[int, float] | None = None
    for count, loss in zip(updates, losses, strict=True):
        if loss <= target:
            if before is None:
                return count
            share = (before[1] - target) / (before[1] - loss)
            return min(count, before[0] + 1 + int(share * (count - before[0])))
        before = count, loss
    return None
