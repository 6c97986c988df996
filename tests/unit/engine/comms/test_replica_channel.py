"""Objects survive the way through tensors, and only plain tensors stay out of the pickle."""

from __future__ import annotations

import pickle
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.replica_channel import pack, unpack

Pair = namedtuple("Pair", "image label")


@dataclass
class Sized:
    """Computes what is no argument, which a tree of fields would lose."""

    x: Tensor
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = len(self.x)


def sent(value: Any) -> Any:
    return unpack([tensor.clone() for tensor in pack(value)])


def test_a_batch_keeps_its_classes_and_values() -> None:
    x = torch.randn(3, 2)
    batch = {
        "pair": Pair(x, [1, 2]),
        "text": ["a", "bc"],
        "sized": Sized(x[1:]),
        "mapping": UserDict(ids=torch.arange(4)),
        "none": None,
        "empty": torch.empty(0, 5, dtype=torch.int64),
        "strided": torch.randn(4, 6)[:, ::2],
    }
    found = sent(batch)
    assert type(found["pair"]) is Pair
    assert torch.equal(found["pair"].image, x)
    assert (found["text"], found["none"], found["pair"].label) == (["a", "bc"], None, [1, 2])
    assert found["sized"].length == 2
    assert torch.equal(found["sized"].x, x[1:])
    assert type(found["mapping"]) is UserDict
    assert torch.equal(found["mapping"]["ids"], torch.arange(4))
    assert found["empty"].shape == (0, 5)
    assert torch.equal(found["strided"], batch["strided"])


def test_a_tensor_that_is_there_twice_travels_once_and_stays_one() -> None:
    x = torch.randn(3)
    assert len(pack([x, {"again": x}])) == 2
    first, second = sent([x, (x,)])
    assert second[0] is first


# So torch 2.11 says when it loads a sparse tensor.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_odd_tensors_stay_odd() -> None:
    odd = [nn.Parameter(torch.ones(2)), torch.eye(2).to_sparse(), torch.empty(2, device="meta")]
    parameter, sparse, meta = sent(odd)
    assert isinstance(parameter, nn.Parameter)
    assert torch.equal(sparse.to_dense(), torch.eye(2))
    assert meta.is_meta


def test_most_objects_of_a_kind_are_as_long() -> None:
    lengths = {len(pack({"x": torch.ones(2), "name": "a" * count})[0]) for count in range(40)}
    assert len(lengths) == 1


def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pack([lambda: None])
