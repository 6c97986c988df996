"""A loader that says where it is in its epoch and goes on from there, as torchdata's does."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from tests.helpers.networks.models import make_data


class ResumableLoader:
    """Yields a replica's batches.

    Args:
        num_batches: Batches of an epoch.
        batch_size: Samples of a batch.
        num_replicas: Number of replicas.
        rank: Index of the replica.
    """

    def __init__(self, num_batches: int, batch_size: int, num_replicas: int, rank: int) -> None:
        samples = make_data(num_batches * batch_size * num_replicas)
        self.x, self.y = (part[rank::num_replicas].split(batch_size) for part in samples.tensors)
        self.num_batches = num_batches
        self.position = 0
        self.first = 0

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.position, self.first = self.first, 0
        while self.position < self.num_batches:
            self.position += 1
            yield self.x[self.position - 1], self.y[self.position - 1]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        # Behind an epoch's last batch begins another.
        self.first = state["position"] % self.num_batches
