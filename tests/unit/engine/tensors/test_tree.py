"""Trees of any container are taken apart and put together; micro-batches test the others."""

from __future__ import annotations

import pickle

import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_dist.engine.tensors.tree import flatten, map_tensors, pickle_skeleton, unflatten


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
