"""Batches of samples of like length, with as many tokens each."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from typing_extensions import override


class LengthBuckets(DistributedSampler[list[int]]):
    """Draws batches of samples of like length: little padding, and about as many tokens in each.

    Short samples are in large batches, long ones in small ones. All replicas of a step have as many
    samples of the same lengths, so none waits for another one's longer batch, and a mean over
    replicas is a mean over samples. What batches there are by length is the same in each epoch.
    Which of the samples of a length are together is drawn anew, as is the order of the batches.

    Lightning sets the epoch of a ``DistributedSampler`` and puts no other one around it. Give it to
    a ``DataLoader`` as ``sampler``, with ``batch_size=None``.

    Args:
        lengths: ``(N,)``, the number of tokens of each sample.
        tokens_per_batch: Most tokens of a batch of one replica, padding included.
        seed: Base seed.
        num_replicas: Number of data replicas.
        rank: The data replica that reads.

    Raises:
        ValueError: A sample has more tokens than a batch may have, or replicas go without any.
    """

    def __init__(
        self,
        lengths: Tensor,
        tokens_per_batch: int,
        seed: int,
        num_replicas: int = 1,
        rank: int = 0,
    ) -> None:
        super().__init__(lengths, num_replicas, rank, seed=seed)  # type: ignore[arg-type]
        self._lengths = lengths
        self._cuts = _cut(lengths.sort().values, tokens_per_batch, num_replicas)

    @override
    def __len__(self) -> int:
        return len(self._cuts)

    @override
    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.randperm(len(self._lengths), generator=generator)
        by_length = drawn[self._lengths[drawn].argsort(stable=True)]
        for index in torch.randperm(len(self._cuts), generator=generator).tolist():
            yield by_length[self._cuts[index]][self.rank :: self.num_replicas].tolist()


def _cut(ascending: Tensor, tokens_per_batch: int, num_replicas: int) -> list[slice]:
    """Cuts sorted lengths into the batches of all replicas, from the longest sample on.

    Fewer samples than there are replicas may be left, of the shortest ones.
    """
    cuts, end = [], len(ascending)
    while end >= num_replicas:
        longest = int(ascending[end - 1])
        size = tokens_per_batch // longest
        if size < 1:
            raise ValueError(
                f"tokens_per_batch={tokens_per_batch} is too few for a sample of {longest} tokens."
                " Allow more, or cut the samples off."
            )
        size = min(size, end // num_replicas) * num_replicas
        cuts.append(slice(end - size, end))
        end -= size
    if not cuts:
        raise ValueError(f"{len(ascending)} samples are fewer than {num_replicas} data replicas.")
    return cuts
