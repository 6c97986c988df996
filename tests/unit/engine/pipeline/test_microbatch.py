from __future__ import annotations

import math
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_dist.engine.pipeline.microbatch import merge, split
from lightning_dist.engine.tensors.samples import batch_size_of
from lightning_dist.engine.tensors.tree import flatten, map_tensors, tensors_in, unflatten

Named = namedtuple("Named", ["x", "label"])


@dataclass(frozen=True)
class Sample:
    x: Tensor
    name: str


def trees(rows: int) -> list[Any]:
    x, y = torch.arange(rows * 2.0).view(rows, 2), torch.arange(rows)
    return [
        x,
        (x, y),
        [x, {"y": y, "k": 3}],
        Named(x, "label"),
        Sample(x, "name"),
        OrderedDict(a=x, b=(y, None)),
        {"x": x, "scale": torch.tensor(2.0), "names": ["a", "b"]},
    ]


@pytest.mark.parametrize("index", range(7))
@given(st.integers(1, 9), st.data())
@settings(max_examples=20)
def test_split_and_merge_are_inverse(index: int, rows: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, rows))
    tree = trees(rows)[index]
    pieces = split(tree, count)
    sizes = [piece.num_samples for piece in pieces]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sum(piece.weight for piece in pieces) == pytest.approx(1.0)
    assert [batch_size_of(piece.content) for piece in pieces] == sizes
    assert type(pieces[0].content) is type(tree)
    for piece in pieces:
        assert [type(x) for x in tensors_in(piece.content)] == [Tensor] * len(tensors_in(tree))
    firsts = [tensors_in(piece.content)[0] for piece in pieces]
    assert torch.equal(torch.cat(firsts), tensors_in(tree)[0])


def test_merge_knows_means_sums_and_rows() -> None:
    outputs = [
        {"rows": torch.ones(2, 3), "mean": torch.tensor(1.0), "count": 2, "tag": "a"},
        {"rows": torch.zeros(1, 3), "mean": torch.tensor(4.0), "count": 5, "tag": "a"},
    ]
    merged = merge(outputs, [2, 1])
    assert merged["rows"].shape == (3, 3)
    assert float(merged["mean"]) == pytest.approx(2.0)
    assert (merged["count"], merged["tag"]) == (7, "a")
    assert merge([None, None], [1, 1]) is None
    weighed = merge(outputs, [2, 1], [1.0, 3.0])
    assert (weighed["rows"].shape, float(weighed["mean"]), weighed["count"]) == ((3, 3), 3.25, 7)
    nothing = [{"mean": torch.tensor(float("nan"))}, {"mean": torch.tensor(4.0)}]
    assert float(merge(nothing, [2, 1], [0.0, 3.0])["mean"]) == 4.0
    assert math.isnan(float(merge(nothing, [2, 1], [0.0, 0.0])["mean"]))
    with pytest.raises(ValueError, match=r"same structure.*\[1, 2\]"):
        merge([[1], [1, 2]], [1, 1])


def test_a_tuple_of_numbers_is_several_results_even_of_as_many_samples() -> None:
    assert merge([(1.0, 2.0), (3.0, 4.0)], [2, 2]) == (2.0, 3.0)
    first, second = np.float32([1, 2]), np.float32([3, 4])
    assert merge([tuple(first), tuple(second)], [2, 2]) == (2.0, 3.0)
    assert merge([(None, True), (None, True)], [2, 2]) == (None, True)
    assert merge([(None, None), (None, None)], [2, 2]) == (None, None)
    assert merge([[1.0, 2.0], [3.0, 4.0]], [2, 2]) == [1.0, 2.0, 3.0, 4.0]
    assert merge([("a", "b"), ("c", "d")], [2, 2]) == ("a", "b", "c", "d")


def test_bad_batches() -> None:
    with pytest.raises(ValueError, match="3 samples.*num_microbatches=4.*drop_last"):
        split(torch.ones(3), 4)
    for nothing in ("text", [np.ones(2), np.ones(2)], (np.ones(2), np.ones(3)), np.array(2.0)):
        with pytest.raises(ValueError, match=r"without tensors.*num_microbatches=2.*=1"):
            split(nothing, 2)
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        split([torch.ones(2), torch.ones(3)], 2)


def test_trees_keep_their_containers() -> None:
    tree = defaultdict(list, a=[torch.ones(1)], b=(None, "text"))
    tensors, skeleton = flatten(tree)
    again = unflatten(tensors, skeleton)
    assert type(again) is defaultdict
    assert again.default_factory is list
    assert again["b"] == (None, "text")
    assert again["a"][0] is tree["a"][0]
    doubled = map_tensors(lambda t: t * 2, Sample(torch.ones(1), "n"))
    assert float(doubled.x) == 2.0


def test_arrays_are_cut_as_tensors_are() -> None:
    rows, scale = np.arange(10.0).reshape(5, 2), np.array(3.0)
    alone = {"pair": (rows, np.arange(5)), "scale": scale}
    views = [rows + float(view) for view in range(4)]
    for batch in (alone, {**alone, "x": torch.ones(5)}, {"x": torch.ones(5), "views": views}):
        assert batch_size_of(batch) == 5
        pieces = [piece.content for piece in split(batch, 2)]
        merged = merge(pieces, [3, 2])
        for name, value in batch.items():
            for found, whole in zip(merged[name], value, strict=True) if name != "scale" else ():
                np.testing.assert_array_equal(found, whole)
    assert pieces[1]["views"][1].tolist() == [[7.0, 8.0], [9.0, 10.0]]
    of_classes = {"x": torch.ones(5), "weights": np.ones(3)}
    assert len(split(of_classes, 2)[0].content["weights"]) == 3


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [
        {"boxes": torch.full((n, 4), float(i)), "id": torch.tensor(i)} for i, n in enumerate(counts)
    ]


@pytest.mark.parametrize(
    ("counts", "is_tensor"),
    [
        ((2, 2, 2, 2), True),
        ((4, 4, 4, 4), True),
        ((1, 3, 2, 5), True),
        ((1, 3, 2, 5), False),
        ((2, 2, 2, 2), False),
        ((4, 4, 4, 4), False),
    ],
)
def test_a_dict_for_each_sample_stays_whole(counts: tuple[int, ...], is_tensor: bool) -> None:
    images = [torch.full((3, 5, 5 + i * (not is_tensor)), float(i)) for i in range(4)]
    batch = (torch.stack(images) if is_tensor else tuple(images), tuple(boxes(*counts)))
    assert batch_size_of(batch) == 4
    for index, piece in enumerate(split(batch, 2)):
        found, targets = piece.content
        assert type(targets) is tuple
        assert [int(target["id"]) for target in targets] == [2 * index, 2 * index + 1]
        assert [len(t["boxes"]) for t in targets] == list(counts[2 * index : 2 * index + 2])
        assert [float(image.max()) for image in found] == [2 * index, 2 * index + 1]


def test_dicts_of_whole_batches_are_cut_inside() -> None:
    views = [{"x": torch.arange(4.0)}, {"x": torch.arange(4.0) + 10}]
    for batch in (views, (torch.arange(4.0), views)):
        assert batch_size_of(batch) == 4
        last = split(batch, 2)[1].content
        found = last if batch is views else last[1]
        assert [view["x"].tolist() for view in found] == [[2, 3], [12, 13]]
    with pytest.raises(ValueError, match=r"first dims are \[2, 3\]"):  # of two loaders
        split([{"x": torch.ones(2)}, {"x": torch.ones(3)}], 2)


def test_detections_that_look_like_columns_in_one_micro_batch_are_joined() -> None:
    first, second = boxes(2, 2), boxes(3, 1)
    for detections in (first, second):
        for found in detections:
            del found["id"]
    merged = merge([first, second], [2, 2])
    assert [len(found["boxes"]) for found in merged] == [2, 2, 3, 1]


def test_a_whole_batch_need_not_tell_its_samples() -> None:
    graphs = {"nodes": torch.rand(7, 2), "edges": torch.zeros(2, 9), "targets": torch.rand(3)}
    (whole,) = split(graphs, 1)
    assert whole.content is graphs
    assert (whole.num_samples, whole.weight) == (1, 1.0)
    with pytest.raises(ValueError, match=r"first dims are \[2, 3, 7\].*num_microbatches=1"):
        split(graphs, 2)
