"""Trees of any container are taken apart and put together; micro-batches test the others."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_dist.engine.tensors.tree import (
    SwappedEntries,
    flatten,
    map_tensors,
    own_copy,
    pickle_skeleton,
    tensors_in,
    unflatten,
)


def test_a_tuple_that_checks_its_arguments() -> None:
    packed = pack_sequence([torch.ones(2, 3), torch.ones(4, 3)], enforce_sorted=False)
    tensors, skeleton = flatten(packed)
    assert len(tensors) == 4
    for again in (unflatten(tensors, skeleton), map_tensors(torch.clone, packed)):
        assert isinstance(again, PackedSequence)
        assert all(map(torch.equal, again, packed))


def test_a_skeleton_of_such_a_tuple_is_read_back() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.zeros(2, 2)])
    tensors, skeleton = flatten({"sequences": [packed], "name": "words"})
    read = pickle.loads(pickle_skeleton(skeleton))
    assert read == skeleton
    rebuilt = unflatten(tensors, read)["sequences"][0]
    assert isinstance(rebuilt, PackedSequence)
    assert all(a is b for a, b in zip(rebuilt, packed, strict=True))


@dataclass
class Part:
    """Has a tensor, and one that is no argument."""

    x: Tensor
    made: Tensor = field(init=False, default_factory=lambda: torch.zeros(1))


def test_tensors_are_listed_in_the_order_of_their_slots() -> None:
    named = pack_sequence([torch.ones(1)])
    tree = [{"b": torch.zeros(2), "a": (torch.ones(3), "name")}, Part(torch.zeros(4)), named, Part]
    tensors, _ = flatten(tree)
    assert [id(t) for t in tensors_in(tree)] == [id(t) for t in tensors]
    assert len(tensors) == 5


class Attributes(dict[str, Any]):
    """Has its items as attributes, and a tensor with one."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def test_a_copy_is_of_the_same_class_and_has_memory_of_its_own() -> None:
    batch = Attributes(x=torch.zeros(2))
    batch.x.lengths = [1, 2]
    copied = own_copy(batch)
    copied.x.add_(1.0)
    copied.x.lengths.append(3)
    assert type(copied) is Attributes
    assert batch.x.tolist() == [0.0, 0.0]
    assert batch.x.lengths == [1, 2]


def test_tensors_that_share_memory_share_it_in_a_copy() -> None:
    whole = torch.zeros(2, 2)
    for batch in ([whole, whole[0]], [whole, whole.view(4)], [whole, whole]):
        copied = own_copy(batch)
        copied[1].add_(1.0)
        assert copied[0].sum() >= 2.0
        assert not whole.any()


def test_a_copy_has_the_layouts_of_the_tensors() -> None:
    columns, wide = torch.zeros(3, 2).t(), torch.zeros(1, 2).expand(3, 2)
    copied = own_copy({"columns": columns, "wide": wide, "sparse": torch.eye(2).to_sparse()})
    assert copied["columns"].stride() == columns.stride()
    assert copied["wide"].stride() == wide.stride()
    assert copied["sparse"].is_sparse
    assert copied["columns"].data_ptr() != columns.data_ptr()


def test_what_cannot_be_copied_stays() -> None:
    batch = [threading.Lock()]
    assert own_copy(batch) is batch


@dataclass
class Note:
    seen: Tensor


@dataclass(frozen=True)
class Fixed:
    seen: Tensor


def test_containers_get_other_tensors_for_a_while() -> None:
    """What is added meanwhile stays, and what is written; all else is as it was."""
    one, two = torch.ones(2), torch.zeros(2)
    tree: Any = ([one, two], {"a": one, "b": [two]}, Note(one), Fixed(one), "text")
    rebuilt = map_tensors(torch.neg, tree)
    swapped = SwappedEntries()
    shown = swapped.swap(tree, rebuilt)
    listed, mapped, note, fixed, text = shown
    assert listed is tree[0]
    assert mapped is tree[1]
    assert mapped["b"] is tree[1]["b"]
    assert note is tree[2]
    assert fixed is rebuilt[3]
    assert text == "text"
    assert float(listed[0][0]) == float(mapped["a"][0]) == float(note.seen[0]) == -1.0

    listed.insert(0, two)
    written = mapped["a"] = torch.full((2,), 5.0)
    swapped.restore()
    assert [*map(id, listed)] == [*map(id, (two, one, two))]
    assert mapped["a"] is written
    assert mapped["b"] == [two]
    assert note.seen is one


def test_what_was_not_rebuilt_is_left_alone() -> None:
    tree = ([torch.ones(1)], {"a": 1})
    assert SwappedEntries().swap(tree, tree) is tree
