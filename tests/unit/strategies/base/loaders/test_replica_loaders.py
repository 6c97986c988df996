"""One rank's loader reads, those of the others give what it has read, over channels in memory."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import DataLoader

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.comms.replica_channel import ReplicaChannel
from lightning_dist.strategies.base.loaders.replica_loaders import ReplicaLoaders

CPU = torch.device("cpu")


class Replica:
    """The ranks of a replica, which take turns in one thread: the reader goes first."""

    def __init__(self, size: int = 3) -> None:
        links = [MemoryChannel() for _ in range(size - 1)]
        ends = zip([*links, None], [None, *links], strict=True)
        self.channels = [ReplicaChannel(CPU, out, into) for out, into in ends]
        self.ranks = [ReplicaLoaders(channel) for channel in self.channels]

    def wrap(self, *loaders: Any) -> list[Any]:
        """Wraps a loader of each rank; one for all stands for as many."""
        several = loaders * len(self.ranks) if len(loaders) == 1 else loaders
        return [rank.wrap(own) for rank, own in zip(self.ranks, several, strict=True)]


def looped(loader: Any) -> CombinedLoader:
    """Gives what Lightning's loops iterate."""
    return CombinedLoader([loader], "sequential")


def batches(loader: Any, count: int | None = None) -> list[Any]:
    """Reads a loader as Lightning does, and leaves it after some batches."""
    found = []
    for batch, *_ in looped(loader):
        found.append(batch)
        if len(found) == count:
            break
    return found


class Own:
    """A loader that must not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("only the first rank reads")

    def __len__(self) -> int:
        return 99


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, "b", None],
        lambda: ({"x": i} for i in range(4)),
        lambda: DataLoader(range(5), 2),  # type: ignore[arg-type]
    ],
)
def test_all_ranks_have_the_same_batches(make: Callable[[], Any], size: int) -> None:
    first, *others = Replica(size).wrap(make(), *[Own()] * (size - 1))
    read = batches(first)
    assert len(read) >= 3
    for other in others:
        for found, own in zip(batches(other), read, strict=True):
            assert torch.equal(found, own) if isinstance(own, torch.Tensor) else found == own


def test_an_iterator_left_early_leaves_nothing() -> None:
    replica = Replica()
    wrapped = replica.wrap(range(5), Own(), Own())
    assert [batches(loader, count) for loader, count in zip(wrapped, (3, 2, 1), strict=True)] == [
        [0, 1, 2],
        [0, 1],
        [0],
    ]
    assert [batches(loader) for loader in wrapped] == [[0, 1, 2, 3, 4]] * 3


def test_several_loaders_are_told_apart() -> None:
    replica = Replica()
    pairs = list(zip(replica.wrap("abc"), replica.wrap("xy"), strict=True))
    whole = [list(CombinedLoader(list(pair), "max_size_cycle")) for pair in pairs]
    assert [batch for batch, *_ in whole[0]] == [["a", "x"], ["b", "y"], ["c", "x"]]
    assert whole[0] == whole[1] == whole[2]


def test_ranks_that_ask_for_different_loaders_are_told() -> None:
    replica = Replica(2)
    first, other = replica.wrap("abc"), replica.wrap("xyz")
    batches(first[0], 1)
    with pytest.raises(ValueError, match="waits for loader 1 .* has read loader 0"):
        batches(other[1], 1)


class Growing:
    """Is longer in each epoch; may say that it is of any length."""

    def __init__(self, said: int | None = None) -> None:
        self.length = 1
        self.said = said

    def __iter__(self) -> Iterator[int]:
        self.length += 1
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length if self.said is None else self.said


def test_lengths_are_those_of_the_reader() -> None:
    replica = Replica()
    growing, endless, lying = Growing(), (i for i in range(3)), Growing(said=7)
    kinds = [replica.wrap(loader, Own(), Own()) for loader in (growing, endless, lying)]
    assert [[sized_len(loader) for loader in kind] for kind in kinds] == [
        [1] * 3,
        [None] * 3,
        [7] * 3,
    ]
    for length in (2, 3):
        assert [len(batches(loader)) for loader in kinds[0]] == [length] * 3
        assert [len(loader) for loader in kinds[0]] == [length] * 3
    assert [len(batches(loader)) for loader in kinds[2]] == [2] * 3


def test_a_length_that_changes_is_known_before_the_loader_is_read() -> None:
    replica = Replica(2)
    growing = Growing()
    changed, other = replica.wrap(growing, Own()), replica.wrap("ab")
    growing.length = 5
    for loader in other:
        batches(loader, 1)
    assert [len(loader) for loader in changed] == [5, 5]


class Drawing:
    """Draws from each generator while it is read."""

    def __iter__(self) -> Iterator[Any]:
        torch.rand(3)
        for _ in range(2):
            yield random.random(), float(np.random.rand()), float(torch.rand(()))
            random.random()


def drawn() -> Any:
    return random.random(), np.random.rand(), torch.rand(()), random.gauss(0, 1)


def test_what_is_drawn_between_batches_is_what_the_reader_draws() -> None:
    first, second = Replica(2).wrap(Drawing(), Own())
    found: list[list[Any]] = []
    for loader in (first, second):
        torch.manual_seed(len(found))  # of no consequence for the second rank
        iterator = iter(looped(loader))
        found.append([(drawn(), batch, drawn()) for batch, *_ in iterator])
        found[-1].append(drawn())
    assert found[0] == found[1]


class Stateful:
    """Goes on where it was."""

    def __init__(self) -> None:
        self.begin = 0

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.begin, 4))

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.begin}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["begin"]


def test_the_readers_state_is_the_replicas() -> None:
    wrapped = Replica(2).wrap(Stateful(), Stateful())
    assert all(isinstance(loader, _Stateful) for loader in wrapped)
    for loader in wrapped:
        loader.load_state_dict({"begin": 2})
    assert wrapped[0].state_dict() == {"begin": 2}
    assert [batches(loader) for loader in wrapped] == [[2, 3]] * 2
    assert not any(isinstance(loader, _Stateful) for loader in Replica(2).wrap("ab"))


def test_hooks_may_read_a_loader_on_one_rank_alone() -> None:
    first, second = Replica(2).wrap("abc", "xyz")
    assert next(iter(first)) == "a"
    assert next(iter(second)) == "x"
    assert list(second) == ["x", "y", "z"]
    assert [batches(first), batches(second)] == [["a", "b", "c"]] * 2


def failing() -> Iterable[int]:
    yield 0
    raise KeyError("sample 7")


def test_a_failure_keeps_its_type_and_wakes_the_others() -> None:
    replica = Replica(2)
    first, second = replica.wrap(failing(), Own())
    with pytest.raises(KeyError, match="sample 7"):
        batches(first)
    replica.channels[0].interrupt(RuntimeError("the first rank receives nothing"))
    replica.channels[1].interrupt(RuntimeError("the cause"))
    with pytest.raises(RuntimeError, match="the cause"):
        batches(second)


def test_a_batch_that_cannot_be_sent_is_refused() -> None:
    first, _ = Replica(2).wrap([lambda: None], Own())
    with pytest.raises(ValueError, match="read='each'"):
        batches(first)


def test_public_attributes_are_the_ranks_own_loaders() -> None:
    first, second = Replica(2).wrap(DataLoader("abcd", 2), DataLoader("uvwxyz", 3))
    assert (first.batch_size, second.batch_size) == (2, 3)
    assert second.dataset == "uvwxyz"
    assert len(second) == 2
    with pytest.raises(AttributeError):
        _ = first._not_there


def test_workers_can_be_ended_through_the_loader() -> None:
    loader = DataLoader("abcd", 2)
    first, _ = Replica(2).wrap(loader)
    loader._iterator = "of workers"  # type: ignore[assignment]
    combined = looped(first)
    combined.reset()
    assert loader._iterator is None


class Watched:
    """A batch sampler of which Lightning wants to know the indices it has given."""

    def __init__(self) -> None:
        self.seen_batch_indices: list[list[int]] = []

    def __iter__(self) -> Iterator[list[int]]:
        self.seen_batch_indices = []
        for indices in ([0, 1], [2]):
            self.seen_batch_indices.append(indices)
            yield indices


def test_indices_of_predicted_samples_are_known_on_all_ranks() -> None:
    own = [DataLoader(range(3), batch_sampler=Watched()) for _ in range(2)]  # type: ignore[arg-type]
    for loader in Replica(2).wrap(*own):
        batches(loader)
        assert loader.batch_sampler.seen_batch_indices == [[0, 1], [2]]


def test_loaders_of_past_epochs_are_let_go_of() -> None:
    replica = Replica(2)
    past = [weakref.ref(loader) for loader in replica.wrap("ab")]
    gc.collect()
    assert [reference() for reference in past] == [None, None]
    assert [batches(loader) for loader in replica.wrap("cd")] == [["c", "d"]] * 2
