"""Large tensors of a message lie in a file that other processes map."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_dist.engine.comms.batches.mapped_tensors import (
    LARGE_BYTES,
    MOST_UNREAD_FILES,
    MessageFiles,
    TensorFiles,
)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def large(*, seed: int = 0) -> Tensor:
    return torch.randn(LARGE_BYTES // 4, generator=torch.Generator().manual_seed(seed))


def chain(size: int) -> list[MessageFiles]:
    """Creates ranks that can map the files of all ranks before."""
    files = [TensorFiles() for _ in range(size)]
    mappable = frozenset(own.secret for own in files)
    return [MessageFiles(mappable, own) for own in files[:-1]] + [
        MessageFiles(frozenset(), files[-1])
    ]


def test_tensors_come_back_as_they_were() -> None:
    odd = [
        large()[:1000].view(10, 100).T,
        torch.tensor(3),
        torch.empty(0, 4),
        torch.randn(3).to(torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(3, dtype=torch.complex64).conj(),
    ]
    files = TensorFiles()
    file = files.write(odd)
    assert file is not None
    for found, wanted in zip(file.map(), odd, strict=True):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    files.close()


def test_only_large_tensors_stay_out_of_the_message() -> None:
    first, last = chain(2)
    tensors = [torch.ones(3), large(), torch.zeros(2), large(seed=1)]
    message = first.put(tensors)
    assert [tensor.numel() for tensor in message[1:]] == [3, 2]
    found, _ = last.get(message)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    first.close()


def test_what_a_rank_writes_no_other_sees() -> None:
    first, middle, last = chain(3)
    wanted = large()
    message = first.put([wanted])
    (one,), passes_on = middle.get(message)
    one.zero_()
    (other,), _ = last.get(message)
    assert passes_on
    assert torch.equal(other, wanted)
    other.zero_()
    assert torch.equal(wanted, large())
    first.close()


def test_the_last_rank_that_maps_a_file_lets_its_owner_close_it() -> None:
    first, middle, last = chain(3)
    before = num_descriptors()
    for number in range(10):
        message = first.put([large(seed=number)])
        (kept,), _ = middle.get(message)
        last.get(message)
        assert num_descriptors() == before + 1
    assert torch.equal(kept, large(seed=9))
    first.close()
    assert num_descriptors() == before
    assert torch.equal(kept, large(seed=9))


def test_files_that_are_not_mapped_yet_do_not_take_all_descriptors() -> None:
    first, last = chain(2)
    before = num_descriptors()
    messages = [first.put([large()]) for _ in range(MOST_UNREAD_FILES + 5)]
    assert num_descriptors() == before + MOST_UNREAD_FILES
    assert all(torch.equal(last.get(message)[0][0], large()) for message in messages)
    first.close()


def test_a_rank_that_the_next_cannot_map_sends_all_bytes() -> None:
    far = MessageFiles(frozenset(), TensorFiles())
    near = chain(2)
    (found,), passes_on = near[0].get(far.put([large()]))
    assert not passes_on
    message = near[0].put([found])  # and where it can, the file is that of the rank in between
    assert torch.equal(near[1].get(message)[0][0], large())
    near[0].close()


def test_another_file_is_refused() -> None:
    files = TensorFiles()
    file = files.write([large()])
    assert file is not None
    with pytest.raises(OSError, match="of another process"):
        replace(file, secret=bytes(16)).map()
    with open(os.devnull) as other, pytest.raises(OSError, match="another file"):
        replace(file, descriptor=other.fileno()).map()
    named = os.memfd_create("lightning_dist_batch_else")
    with pytest.raises(OSError, match="another file"):
        replace(file, descriptor=named).map()
    os.close(named)
    with pytest.raises(FileNotFoundError):
        replace(file, descriptor=named).map()
    files.close()
