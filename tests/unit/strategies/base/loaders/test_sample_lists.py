"""Lists with a tensor for each sample are told from those with one for each column."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_dist.engine.pipeline.microbatch import split
from lightning_dist.engine.tensors.samples import SampleList, SampleTuple, batch_size_of
from lightning_dist.strategies.base.loaders.sample_lists import (
    SampleLists,
    has_tensor_per_sample,
    mark_first,
)


@pytest.mark.parametrize(
    ("num_tensors", "length", "batch_size", "expected"),
    [
        (8, 5, 8, True),
        (2, 8, 8, False),
        (3, 9, 8, True),  # a last batch of 3 samples
        (9, 3, 8, False),
        (3, 5, 8, None),
        (8, 8, 8, False),
        (3, 3, 8, None),
        (8, 5, None, None),
    ],
)
def test_the_batch_size_tells(
    num_tensors: int, length: int, batch_size: int | None, expected: bool | None
) -> None:
    batch = [torch.ones(length, 2)] * num_tensors
    assert has_tensor_per_sample(batch, batch_size) is expected


def test_a_batch_sampler_knows_the_batch_size() -> None:
    """Lightning gives a loader that predicts a batch sampler of its own."""
    sampler = BatchSampler(SequentialSampler(range(16)), batch_size=8, drop_last=False)
    loader = DataLoader(range(16), batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    lists = SampleLists(cast(Any, SimpleNamespace(predict_dataloaders=loader)))
    assert isinstance(lists.mark([torch.ones(5, 2)] * 8, "predict_step"), SampleList)


def marked(*batches: Any, collate_fn: Any = list) -> list[bool]:
    loader = DataLoader([0], batch_size=8, collate_fn=collate_fn)  # type: ignore[arg-type]
    lists = SampleLists(cast(Any, SimpleNamespace(train_dataloader=loader)))
    return [isinstance(lists.mark(batch, "training_step"), SampleList) for batch in batches]


def test_later_batches_are_as_the_first_whole_one() -> None:
    whole, last = [torch.ones(5)] * 8, [torch.ones(5)] * 3
    assert marked(last, whole, last) == [False, True, True]
    assert marked([torch.ones(5), torch.ones(3)]) == [True]
    assert marked([torch.ones(8)] * 8, last, whole) == [False] * 3  # 8 columns
    assert marked([torch.ones(8)] * 8, [torch.ones(5), torch.ones(3)], last) == [False, True, True]
    assert marked(whole, [torch.ones(8)] * 8) == [True, True]
    assert marked(whole, tuple(whole), collate_fn=None) == [False, False]
    assert marked(torch.ones(8, 5), [], [whole]) == [False] * 3


def test_columns_that_are_lists_and_tuples_are_marked() -> None:
    whole, last = (torch.ones(5),) * 8, (torch.ones(5),) * 3
    loader = DataLoader([0], batch_size=8, collate_fn=list)  # type: ignore[arg-type]
    lists = SampleLists(cast(Any, SimpleNamespace(train_dataloader=loader)))
    for images in (whole, last):
        size = len(images)
        labels = tuple(range(size))
        batch = {"x": images, "both": [(image, torch.ones(())) for image in images], "y": labels}
        found = lists.mark(batch, "training_step")
        assert type(found["x"]) is SampleTuple
        assert type(found["both"]) is SampleList
        assert found["y"] is labels
        first, second = split(found, 2)
        assert [len(part.content["x"]) for part in (first, second)] == [size - size // 2, size // 2]
        assert type(first.content["x"]) is tuple
        assert first.content["y"] == labels[: first.num_samples]


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(8, 2), torch.ones(8, 2)),  # two views
        (torch.ones(8, 2), torch.ones(8)),
        [(torch.ones(8), torch.ones(8)), torch.ones(8)],
        ((torch.ones(5, 2), torch.ones(5)) * 4),  # not alike, so no samples
        [[{"boxes": torch.ones(5, 4)}] * 8],
    ],
    ids=str,
)
def test_other_columns_stay(batch: Any) -> None:
    loader = DataLoader([0], batch_size=8, collate_fn=list)  # type: ignore[arg-type]
    lists = SampleLists(cast(Any, SimpleNamespace(train_dataloader=loader)))
    assert not tree_has_marks(lists.mark(batch, "training_step"))


def test_two_views_stay_columns_in_a_last_batch() -> None:
    loader = DataLoader([0], batch_size=2, collate_fn=list)  # type: ignore[arg-type]
    lists = SampleLists(cast(Any, SimpleNamespace(train_dataloader=loader)))
    for size in (2, 1):
        batch = ((torch.ones(size, 3),) * 2, torch.ones(size))
        assert not tree_has_marks(lists.mark(batch, "training_step"))


def tree_has_marks(tree: Any) -> bool:
    if isinstance(tree, SampleList | SampleTuple):
        return True
    values = tree.values() if isinstance(tree, dict) else tree
    return isinstance(tree, dict | list | tuple) and any(map(tree_has_marks, values))


@pytest.mark.parametrize("collations", [(list, None), (None, list)])
def test_a_loader_may_be_replaced_by_one_that_collates_otherwise(collations: Any) -> None:
    """As ``reload_dataloaders_every_n_epochs`` does."""
    trainer, batch = SimpleNamespace(), [torch.ones(5)] * 8
    lists = SampleLists(cast(Any, trainer))
    for collate_fn in collations:
        trainer.train_dataloader = DataLoader([0], batch_size=8, collate_fn=collate_fn)  # type: ignore[arg-type]
        found = lists.mark(batch, "training_step")
        assert isinstance(found, SampleList) is (collate_fn is list)


def test_a_first_batch_is_marked_by_its_loader() -> None:
    batch = [torch.ones(5)] * 8
    for collate_fn, expected in ((list, True), (None, False)):
        loader = DataLoader([0], batch_size=8, collate_fn=collate_fn)  # type: ignore[arg-type]
        assert isinstance(mark_first(batch, loader), SampleList) is expected
    assert not isinstance(mark_first(batch, [batch]), SampleList)  # of unknown size


def loader_of(collate_fn: Any = list) -> DataLoader[int]:
    return DataLoader([0], batch_size=8, collate_fn=collate_fn)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "loaders",
    [
        {"a": loader_of(None), "b": loader_of()},
        [loader_of(None), loader_of()],
        {"a": [loader_of(None)], "b": loader_of()},
    ],
)
def test_loaders_of_an_evaluation_are_found_by_their_index(loaders: Any) -> None:
    for step, name in (("validation_step", "val_dataloaders"), ("test_step", "test_dataloaders")):
        lists = SampleLists(cast(Any, SimpleNamespace(**{name: loaders})))
        found = [isinstance(lists.mark([torch.ones(5)] * 8, step, i), SampleList) for i in (0, 1)]
        assert found == [False, True]


def test_a_training_batch_of_several_loaders_is_cut_by_each() -> None:
    trainer = SimpleNamespace(train_dataloader={"a": loader_of(), "b": [loader_of(None)]})
    batch = {"a": [torch.full((5,), float(i)) for i in range(8)], "b": [torch.arange(8)]}
    lists = SampleLists(cast(Any, trainer))
    first, second = split(lists.mark(batch, "training_step"), 2)
    assert (first.num_samples, second.num_samples) == (4, 4)
    assert [len(tensor) for tensor in second.content["a"]] == [5] * 4
    assert [float(tensor[0]) for tensor in second.content["a"]] == [4.0, 5.0, 6.0, 7.0]
    assert second.content["b"][0].tolist() == [4, 5, 6, 7]
    batch["a"].pop()
    with pytest.raises(ValueError, match=r"their first dims are \[7, 8\]"):
        split(lists.mark(batch, "training_step"), 2)


def test_a_list_of_samples_is_cut_between_them() -> None:
    samples = SampleList(torch.full((4,), float(index)) for index in range(5))
    assert batch_size_of(samples) == 5
    pieces = split(samples, 2)
    assert [piece.num_samples for piece in pieces] == [3, 2]
    assert [float(t[0]) for t in pieces[1].content] == [3.0, 4.0]
    assert all(type(piece.content) is list for piece in pieces)
