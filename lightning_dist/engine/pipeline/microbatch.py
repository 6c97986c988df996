"""Cut a batch into micro-batches, read the loss of each, and join their outputs.

Micro-batches need not be equal: seven samples in four micro-batches are 2, 2, 2 and 1. Each
micro-batch then weighs by its share of the samples. If the loss is a mean over samples, the sum of
the weighted gradients is exactly the undivided batch's gradient, whatever the cut.

If a loss is a mean over something else (the tokens that are not ignored, say), the step returns its
weight, too: ``{"loss": ..., "weight": n}``. Then the undivided batch's loss is the sum of all
``n * loss`` over the sum of all ``n``. The same holds for the gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_dist.engine.tensors.remote_tensor import check_known
from lightning_dist.engine.tensors.samples import Samples, samples_of
from lightning_dist.engine.tensors.tree import map_leaves, own_copy


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One piece of a batch.

    Attributes:
        index: Position in the batch.
        content: The tree that the user's step gets in place of the batch.
        num_samples: Rows of this micro-batch.
        weight: Share of the batch's samples, in (0, 1]; the weights of a batch sum to one.
    """

    index: int
    content: Any
    num_samples: int
    weight: float

    def copied(self) -> Microbatch:
        """Returns one whose content a step may change."""
        return replace(self, content=own_copy(self.content))


@dataclass(frozen=True, slots=True)
class Loss:
    """A micro-batch's loss.

    Attributes:
        value: A tensor of one element.
        weight: What the loss is a mean over, in any unit; None if the samples count.
    """

    value: Tensor
    weight: float | None

    @classmethod
    def of(cls, result: Any) -> Loss:
        """Creates the loss from a training step's result.

        Args:
            result: The loss, or a mapping with the loss under ``"loss"``, and maybe ``"weight"``.

        Raises:
            ValueError: There is no loss, it was computed of another rank's values, or its weight
                is not a finite number of at least zero.
        """
        value = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(
                "A training step must return its loss, a tensor of one element, or a dict with it"
                f" under 'loss', but returned {got}. Skipping a step by returning None is not"
                " possible in a pipeline or a dry run: return a loss of zero, like"
                " `output.sum() * 0.0`."
            )
        check_known(value)
        if not isinstance(result, Mapping) or "weight" not in result:
            return cls(value, None)
        weight = weight_of(result)
        if weight is None or not math.isfinite(weight) or weight < 0.0:
            raise ValueError(
                f"A training step returned 'weight': {result['weight']!r} beside its loss. That is"
                " what the loss is a mean over (how many tokens, say): one finite number that is"
                " not negative. Call it by another name if it means something else."
            )
        return cls(value, weight)


def weight_of(result: Any) -> float | None:
    """Returns the number under ``"weight"`` beside a loss in a step's result; None without one."""
    if not isinstance(result, Mapping) or not {"loss", "weight"} <= result.keys():
        return None
    weight = result["weight"]
    if isinstance(weight, Tensor):
        return float(weight.detach()) if weight.numel() == 1 else None
    return float(weight) if isinstance(weight, Real) else None


def split(batch: Any, num_microbatches: int) -> list[Microbatch]:
    """Cuts a batch into micro-batches of almost equal size, the larger first.

    Args:
        batch: Any tree of tensors with the samples in dim 0, of numpy's arrays with as many rows,
            and of lists with an entry per sample (names, or dicts of one sample's boxes). Zero-dim
            tensors and other leaves go into each micro-batch unchanged. A whole batch need not tell
            its samples, as one of graphs, whose nodes and edges are joined.
        num_microbatches: Number of micro-batches.

    Returns:
        The micro-batches in order.

    Raises:
        ValueError: Fewer samples than micro-batches, or tensors that disagree on the samples.
    """
    if num_microbatches == 1:
        return [Microbatch(0, batch, _count_if_known(batch), 1.0)]
    samples = samples_of(batch)
    num_samples = samples.count
    if num_samples is None:
        raise ValueError(
            "A batch without tensors, whose arrays do not agree on the number of samples, cannot be"
            f" cut into num_microbatches={num_microbatches}. Collate samples to tensors or arrays"
            " with the samples in the first dim, or leave batches whole with num_microbatches=1."
        )
    if num_samples < num_microbatches:
        raise ValueError(
            f"A batch of {num_samples} samples cannot be cut into num_microbatches="
            f"{num_microbatches}, as an asynchronous schedule must. Lower `num_microbatches`, raise"
            " the batch size, or drop the last, smaller batch with `DataLoader(drop_last=True)`."
        )
    sizes = [
        num_samples // num_microbatches + (index < num_samples % num_microbatches)
        for index in range(num_microbatches)
    ]
    columns = [_cut(leaf, sizes, samples) for leaf in _leaves(batch, samples.is_column)]

    def piece(index: int) -> Any:
        own = iter([column[index] for column in columns])
        return map_leaves(lambda _: next(own), batch, samples.is_column)

    return [
        Microbatch(index, piece(index), size, size / num_samples)
        for index, size in enumerate(sizes)
    ]


def _count_if_known(batch: Any) -> int:
    try:
        return samples_of(batch).count or 1
    except ValueError:
        return 1


def _cut(leaf: Any, sizes: Sequence[int], samples: Samples) -> Sequence[Any]:
    if isinstance(leaf, Tensor) and leaf.ndim > 0:
        pieces = torch.split(leaf, list(sizes))
        # With memory of their own: autograd takes a write into one piece for one into all.
        return pieces if leaf.requires_grad else [piece.clone() for piece in pieces]
    if samples.is_column(leaf):
        ends = list(accumulate(sizes))
        return [leaf[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    return [leaf] * len(sizes)


def merge(
    outputs: Sequence[Any], sizes: Sequence[int], weights: Sequence[float] | None = None
) -> Any:
    """Joins the micro-batches' outputs into the undivided batch's output.

    Args:
        outputs: One tree per micro-batch, all of the same structure.
        sizes: Samples per micro-batch.
        weights: Weight of each micro-batch's means; None means its number of samples.

    Returns:
        One tree. Tensors and arrays with the samples in dim 0 and lists with an entry per sample
        (and tuples, unless of numbers or None) are concatenated, floating zero-dim tensors and
        floats are averaged with the weights, integers are summed, and of other leaves the first is
        taken.

    Raises:
        ValueError: The outputs have different numbers of leaves.
    """
    if len(outputs) == 1:
        return outputs[0]
    # Outputs of one micro-batch may look otherwise than those of the next: a box for each sample.
    for has_rows in (False, True):
        per_sample = [Samples(size, has_rows).is_output_column for size in sizes]
        columns = [_leaves(*pair) for pair in zip(outputs, per_sample, strict=True)]
        if len({len(column) for column in columns}) == 1:
            break
    if len({len(column) for column in columns}) != 1:
        raise ValueError(
            "A step must return the same structure for each micro-batch, but the numbers of leaves"
            f" were {[len(column) for column in columns]}."
        )
    shares = sizes if weights is None else weights
    merged = iter([_merge_leaf(list(leaves), shares) for leaves in zip(*columns, strict=True)])
    return map_leaves(lambda _: next(merged), outputs[0], per_sample[0])


def _leaves(tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    leaves: list[Any] = []
    map_leaves(leaves.append, tree, is_leaf)
    return leaves


def _merge_leaf(leaves: list[Any], shares: Sequence[float]) -> Any:
    first = leaves[0]
    if isinstance(first, list | tuple):
        return type(first)(chain.from_iterable(leaves))
    if isinstance(first, Tensor) and first.ndim > 0:
        return torch.cat(leaves)
    if isinstance(first, np.ndarray) and first.ndim > 0:
        return np.concatenate(leaves)
    if isinstance(first, Tensor) and not first.is_floating_point():
        return torch.stack(leaves).sum()
    if isinstance(first, bool):
        return first
    if isinstance(first, Integral):
        return sum(leaves)
    if isinstance(first, Tensor | Real):
        return mean_of(leaves, shares)
    return first


def mean_of(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Averages numbers or tensors; one of weight zero does not count, even if nan."""
    total = sum(weights)
    pairs = [pair for pair in zip(values, weights, strict=True) if pair[1] > 0]
    return sum(value * (weight / total) for value, weight in pairs) if pairs else values[0]
