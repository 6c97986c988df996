"""A stream goes on where its state says, and is shared out without a rest."""

from __future__ import annotations

import copy
import importlib
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.streaming import shards
from recipes.streaming.data import StreamLoader, TokenStreamDataModule
from recipes.streaming.shards import found_shards, write_shards
from recipes.text import load_text

LENGTH, SHARDS, ROWS = 32, 4, 42


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shards")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "load_text", lambda: load_text()[:6000])
        list(write_shards(path, LENGTH, SHARDS))
    return path


def make(
    folder: Path, rank: int = 0, num_replicas: int = 1, epoch: int = 0, **options: Any
) -> TokenStreamDataModule:
    given = {"batch_size": 8, "sequence_length": LENGTH, "window": 16, **options}
    data = TokenStreamDataModule(str(folder), **given)
    replica = {"num_replicas": num_replicas, "rank": rank}
    data.trainer = SimpleNamespace(distributed_sampler_kwargs=replica, current_epoch=epoch)  # type: ignore[assignment]
    data.setup("fit")
    return data


def read(loader: StreamLoader) -> list[Tensor]:
    return [inputs for inputs, _ in loader]


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_batches_and_their_number(folder: Path) -> None:
    loader = make(folder).train_dataloader()
    batches = list(loader)
    assert len(batches) == len(loader) == SHARDS * ROWS // 8
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (8, LENGTH)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    validation = make(folder).val_dataloader()
    assert len(list(validation)) == len(validation) == 2  # 16 rows


def test_replicas_and_epochs_share_the_shards_out(folder: Path) -> None:
    def epoch_of(epoch: int) -> list[set[tuple[int, ...]]]:
        loaders = [make(folder, rank, 2, epoch, batch_size=2).train_dataloader() for rank in (0, 1)]
        return [{tuple(row) for b in read(loader) for row in b.tolist()} for loader in loaders]

    one, other = epoch_of(0)
    assert not one & other
    assert len(one) == len(other) == 2 * ROWS
    assert set.union(*epoch_of(3)) == one | other


def test_each_epoch_has_another_order_which_the_seed_repeats(folder: Path) -> None:
    orders = [read(make(folder, epoch=epoch).train_dataloader()) for epoch in (0, 1, 1)]
    assert equal(orders[1], orders[2])
    assert not equal(orders[0], orders[1])
    assert not equal(orders[0], read(make(folder, seed=1).train_dataloader()))
    in_place = torch.cat(read(make(folder, window=1).train_dataloader()))
    shuffled = torch.cat(orders[0])
    assert not torch.equal(in_place, shuffled)
    rows = [{tuple(row) for row in order.tolist()} for order in (in_place, shuffled)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_goes_on_inside_of_an_epoch(folder: Path, num_workers: int) -> None:
    options = {"epoch": 1, "num_workers": num_workers}
    loader = make(folder, **options).train_dataloader()
    whole = read(loader)
    head = list(islice(loader, 5))
    state = copy.deepcopy(loader.state_dict())
    assert equal([inputs for inputs, _ in head], whole[:5])

    data = make(folder, **options)
    resumed = data.train_dataloader()
    resumed.load_state_dict(state)
    assert equal(read(resumed), whole[5:])
    data.trainer.current_epoch = 2  # type: ignore[union-attr]
    third = read(resumed)
    assert len(third) == len(whole)
    assert not equal(third, whole)


@pytest.mark.some("0")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_of_an_epochs_end_begins_the_next_one(folder: Path, num_workers: int) -> None:
    loader = make(folder, num_workers=num_workers).train_dataloader()
    list(islice(loader, len(loader)))  # Lightning counts, and does not ask for one more
    state = copy.deepcopy(loader.state_dict())
    second = read(make(folder, epoch=1, num_workers=num_workers).train_dataloader())

    data = make(folder, num_workers=num_workers)
    resumed = data.train_dataloader()
    resumed.load_state_dict(state)
    assert read(resumed) == []
    data.trainer.current_epoch = 1  # type: ignore[union-attr]
    assert equal(read(resumed), second)
    again = make(folder, epoch=1, num_workers=num_workers).train_dataloader()
    again.load_state_dict(state)
    assert equal(read(again), second)


def test_a_folder_without_shards_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no shards .* `python -m recipes.streaming.shards "):
        make(tmp_path)


def test_shards_that_are_missing_are_counted(folder: Path, tmp_path: Path) -> None:
    for path in found_shards(folder, "train")[1:]:
        target = tmp_path / "train" / path.name
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="3 of 4 shards.*--sequence-length 32 --shards 4"):
        make(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sequence_length": 64},
            "have sequence_length 32, vocab_size 256, and sequence_length=64",
        ),
        ({"vocab_size": 50257}, "vocab_size=50257 was asked for"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"window": 0}, "window=0 must be at least 1"),
    ],
)
def test_other_shards_than_were_asked_for(
    folder: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(folder, **options)


@pytest.mark.parametrize(
    ("num_replicas", "options", "message"),
    [
        (8, {}, "4 shards cannot be shared out evenly to 8 data replicas. Write a multiple of 8"),
        (3, {}, "4 shards cannot be shared out evenly to 3 data replicas"),
        (2, {"num_workers": 4}, "to 2 data replicas of 4 workers each. Write a multiple of 8"),
        (2, {"batch_size": 85}, "batch_size=85 is more than the 84 sequences"),
    ],
)
def test_shards_that_cannot_be_shared_out(
    folder: Path, num_replicas: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(folder, 0, num_replicas, **options).train_dataloader()


def test_a_missing_library_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.delitem(sys.modules, "recipes.streaming.data")
    with pytest.raises(ImportError, match=r"pip install 'lightning-dist\[data\]'"):
        importlib.import_module("recipes.streaming.data")
