"""How many samples a batch has, and which of its lists have an entry for each.

Tensors have the samples in their first dim, and so have arrays of numpy. Beside them a batch may
have lists with an entry per sample, such as names, or what a detector learns from: a dict with the
boxes of each image, or even a list of images of different sizes. Such lists are cut between their
entries. But a list may also hold whole tensors, such as two views of each sample, or dicts of
these. Lengths tell them apart.

torch's transformers and recurrent layers take dim 0 for time, unless ``batch_first=True``. A batch
that is laid out for them, [time, batch, features], would be cut in time, and attention would see a
part of each sequence.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
from functools import partial
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_dist.engine.tensors.tree import map_leaves, tensors_in


class SampleList(list[Any]):
    """A batch, or a part of one, with an entry for each sample; its pieces are plain lists."""


class SampleTuple(tuple[Any, ...]):
    """As :class:`SampleList`, of a tuple; its pieces are plain tuples."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of a batch, or of what a step returns for one.

    Attributes:
        count: Their number; None if there is no tensor, and no array outside of lists.
        has_rows: Whether each list of as many dicts, or of as many tensors, has one per sample.
    """

    count: int | None
    has_rows: bool = False

    def is_column(self, tree: Any) -> bool:
        """Returns whether an array has a row per sample, or a list or tuple an entry.

        Such entries are names, numbers, arrays, or dicts.
        """
        if isinstance(tree, SampleList | SampleTuple):
            return True
        if isinstance(tree, np.ndarray):
            return tree.ndim > 0 and len(tree) == self.count
        if not _is_list(tree) or len(tree) != self.count:
            return False
        if _are(np.ndarray, tree) and all(map(self.is_column, tree)):  # each has all samples
            return False
        if self.has_rows and (_are(Mapping, tree) or _are(Tensor, tree)):
            return True
        return all(self._is_of_one(entry) for entry in tree)

    def is_output_column(self, output: Any) -> bool:
        """Returns whether a step's output has one entry per sample; a tuple of numbers has not."""
        is_results = isinstance(output, tuple) and any(
            entry is None or isinstance(entry, Number)  # numpy's scalars too
            for entry in output
        )
        return not is_results and self.is_column(output)

    def _is_of_one(self, entry: Any) -> bool:
        if isinstance(entry, Mapping):
            tensors = tensors_in(entry)
            return any(t.ndim == 0 or len(t) != self.count for t in tensors) or not tensors
        return not isinstance(entry, Tensor | list | tuple) and not is_dataclass(entry)


def batch_size_of(batch: Any) -> int | None:
    """Counts the samples of a batch; None if it tells of none. Raises as :func:`samples_of`."""
    return samples_of(batch).count


def samples_of(batch: Any) -> Samples:
    """Counts the samples of a batch.

    Args:
        batch: Any tree; a :class:`SampleList` or tuple in it has as many samples as entries.

    Raises:
        ValueError: The tensors disagree, and no list of dicts tells how many samples there are.
    """
    sizes = _sizes(batch)
    outside, records = _without(batch, lambda found: _are(Mapping, found))
    lengths = {len(found) for found in records}
    if len(lengths) == 1:
        (length,) = lengths
        if len(sizes) == 1 and (sizes != [length] or not _sizes(outside)):
            return Samples(sizes[0])  # each dict has all samples
        rest, rows = _without(outside, lambda found: len(found) == length and _are(Tensor, found))
        tells = bool(_sizes(rest) or rows) or any(
            len(_sizes(record)) > 1 for found in records for record in found
        )
        if tells and set(_sizes(rest)) <= {length}:
            return Samples(length, has_rows=True)
    if len(sizes) > 1:
        shapes = [tuple(t.shape) for t in tensors_in(batch) if t.ndim > 0]
        raise ValueError(
            f"The tensors of a batch must have the samples in their first dim, but their first dims"
            f" are {sizes} (shapes {shapes}). Give tensors that are not per sample another place"
            " (a buffer of the module, say), or repeat them for each sample; pad targets that are"
            " joined, with a row for each sample; or leave batches whole with num_microbatches=1."
        )
    found = sizes or _sizes_of_arrays(batch)
    return Samples(found[0] if len(found) == 1 else None)


def _sizes_of_arrays(batch: Any) -> list[int]:
    found: set[int] = set()

    def note(leaf: Any) -> None:
        if isinstance(leaf, np.ndarray) and leaf.ndim > 0:
            found.add(len(leaf))

    map_leaves(note, batch, lambda tree: isinstance(tree, list))  # it may have one for each sample
    return sorted(found)


def _sizes(tree: Any) -> list[int]:
    rest, lists = _without(tree, lambda found: isinstance(found, SampleList | SampleTuple))
    return sorted({len(t) for t in tensors_in(rest) if t.ndim > 0} | set(map(len, lists)))


def _without(
    batch: Any, is_taken: Callable[[Sequence[Any]], bool]
) -> tuple[Any, list[Sequence[Any]]]:
    """Returns a batch without some of its lists, and these."""
    taken: list[Sequence[Any]] = []

    def is_leaf(tree: Any) -> bool:
        return _is_list(tree) and is_taken(tree)

    def drop(leaf: Any) -> Any:
        if not is_leaf(leaf):
            return leaf
        taken.append(leaf)
        return None

    return map_leaves(drop, batch, is_leaf), taken


def split_off_lists(batch: Any) -> tuple[Any, list[Sequence[Tensor]]]:
    """Returns a batch without its lists of tensors with as many dims as each other, and these."""
    return _without(
        batch,
        lambda found: (
            isinstance(found, list) and _are(Tensor, found) and len({t.ndim for t in found}) == 1
        ),
    )


def _is_list(tree: Any) -> bool:
    return isinstance(tree, list | tuple) and not hasattr(tree, "_fields")


def _are(kind: type, entries: Sequence[Any]) -> bool:
    return bool(entries) and all(isinstance(entry, kind) for entry in entries)


@contextmanager
def warn_of_time_first(layers: nn.Module, num_samples: int) -> Iterator[None]:
    """Warns of one of the layers, which run meanwhile, with a micro-batch's samples for time."""
    has_warned = False

    def look(name: str, part: nn.Module, given: tuple[Any, ...]) -> None:
        nonlocal has_warned
        x = given[0] if given else None
        if has_warned or not isinstance(x, Tensor) or x.ndim != 3:
            return  # without a third dim it is one sequence, of any length
        if x.shape[0] != num_samples or x.shape[1] == num_samples:
            return  # its samples are in dim 1
        has_warned = True
        warnings.warn(
            f"{name!r} ({type(part).__name__} with batch_first=False) takes dim 0 of its input for"
            f" time, and got {tuple(x.shape)}, with the {num_samples} samples of a micro-batch"
            " there. A batch is cut along dim 0, so sequences may be cut in time. Lay batches out"
            " as [samples, time, ...] and pass batch_first=True, or transpose in front of the"
            " layer, or set num_microbatches=1.",
            stacklevel=2,
        )

    with ExitStack() as hooks:
        for name, part in layers.named_modules():
            # A hook would have a compiled layer compiled anew.
            if getattr(part, "batch_first", None) is False and part._compiled_call_impl is None:
                hooks.callback(part.register_forward_pre_hook(partial(look, name)).remove)
        yield
