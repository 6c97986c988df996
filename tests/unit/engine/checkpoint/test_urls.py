"""A checkpoint at a URL: the marker decides, and there is no rename to rely on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor

from lightning_dist import PipelineStrategy
from lightning_dist.__main__ import main
from lightning_dist.engine.checkpoint import places
from lightning_dist.engine.checkpoint.files import is_sharded, load_full, save_full, save_sharded
from lightning_dist.engine.checkpoint.places import MARKER, UrlPlace, place_of
from lightning_dist.strategies.base.saving.whole_file import WholeFileIO
from tests.helpers.networks.models import make_module, make_trainer
from tests.helpers.object_store import ObjectStore

URL = "memory://bucket/epoch=3.ckpt"


@pytest.fixture(autouse=True)
def store() -> Iterator[Any]:
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


def checkpoint(value: float) -> dict[str, Any]:
    return {"epoch": 3, "state_dict": {"a": torch.full((2, 3), value), "b": torch.tensor(value)}}


def states(url: str) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = load_full(url)["state_dict"]
    return loaded


def names(files: Any, url: str = URL) -> list[str]:
    found = files.ls(url.removeprefix("memory:/"), detail=False)
    return sorted(path.rpartition("/")[2].partition("-")[0] for path in found)


def test_a_save_reads_back_and_replaces_the_one_before(store: Any) -> None:
    for value in (1.0, 2.0):
        save_sharded(checkpoint(value), URL, None)
        assert is_sharded(URL)
        loaded = load_full(URL)
        assert loaded["epoch"] == 3
        assert loaded.keys() == checkpoint(value).keys()
        for name, tensor in checkpoint(value)["state_dict"].items():
            assert torch.equal(loaded["state_dict"][name], tensor)
        assert names(store) == ["README.txt", MARKER, "shards"]


@pytest.mark.parametrize("is_url", [True, False])
def test_a_mark_that_another_run_has_removed_is_no_error(tmp_path: Path, is_url: bool) -> None:
    draft = place_of(URL if is_url else tmp_path / "last.ckpt").draft("own")
    draft.make_marked("mark")
    for _ in range(2):
        draft.unmark("mark")
        assert not draft.has("mark")


def test_nothing_is_renamed_but_torchs_index(tmp_path: Path) -> None:
    url = f"objects://{tmp_path}/some.ckpt"
    save_sharded(checkpoint(1.0), url, None)
    assert torch.equal(states(url)["a"], torch.ones(2, 3))
    with pytest.raises(NotImplementedError, match="is no object"):
        ObjectStore().mv(str(tmp_path / "some.ckpt"), str(tmp_path / "other.ckpt"))


@pytest.mark.parametrize("step", ["write_shards", "publish"])
def test_a_save_that_fails_leaves_the_one_before(
    store: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the bucket is gone")

    save_sharded(checkpoint(1.0), URL, None)
    where = places.UrlPlace if step == "publish" else "lightning_dist.engine.checkpoint.shards"
    with monkeypatch.context() as patch:
        if isinstance(where, str):
            patch.setattr(f"{where}.{step}", fail)
        else:
            patch.setattr(where, step, fail)
        with pytest.raises(OSError, match="bucket is gone"):
            save_sharded(checkpoint(2.0), URL, None)
    assert torch.equal(states(URL)["a"], torch.ones(2, 3))
    assert names(store) == ["README.txt", MARKER, "shards"]


def test_a_killed_save_counts_as_none_and_is_swept_up(store: Any) -> None:
    store.pipe_file("/bucket/epoch=3.ckpt/shards-killed/__0_0.distcp", b"half")
    assert not is_sharded(URL)
    with pytest.raises(FileNotFoundError, match="neither a file nor a directory"):
        load_full(URL)
    save_sharded(checkpoint(1.0), URL, None)
    assert names(store) == ["README.txt", MARKER, "shards"]


def test_the_marker_goes_first(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save_sharded(checkpoint(1.0), URL, None)
    removed: list[str] = []
    for method in ("rm_file", "rm"):
        before = getattr(type(store), method)

        def note(self: Any, path: str, *args: Any, _before: Any = before, **keywords: Any) -> None:
            removed.append(path.rpartition("/")[2])
            _before(self, path, *args, **keywords)

        monkeypatch.setattr(type(store), method, note)
    WholeFileIO().remove_checkpoint(URL)
    assert removed[0] == MARKER
    assert not store.exists("/bucket/epoch=3.ckpt")


@pytest.mark.parametrize("shards", [None, 3, "shards-a/../../secret", "elsewhere"])
def test_a_marker_names_shards_beside_it_only(store: Any, shards: Any) -> None:
    save_sharded(checkpoint(1.0), URL, None)
    with store.open(f"{URL}/{MARKER}", "rb") as file:
        rest = torch.load(file, weights_only=True)
    with store.open(f"{URL}/{MARKER}", "wb") as file:
        torch.save({**rest, "shards": shards}, file)
    with pytest.raises(ValueError, match="names no shards beside it"):
        load_full(URL)


def test_one_file_takes_the_place_of_shards(store: Any) -> None:
    save_sharded(checkpoint(1.0), URL, None)
    WholeFileIO().save_checkpoint(checkpoint(2.0), URL)
    assert torch.equal(states(URL)["a"], torch.full((2, 3), 2.0))
    assert not UrlPlace(URL).has_checkpoint()


@pytest.mark.parametrize("is_url", [False, True])
def test_options_that_are_refused_remove_nothing(tmp_path: Path, is_url: bool) -> None:
    path = URL if is_url else str(tmp_path / "some.ckpt")
    save_sharded(checkpoint(1.0), path, None)
    with pytest.raises(TypeError, match="storage_options"):
        WholeFileIO().save_checkpoint(checkpoint(2.0), path, storage_options={"key": "value"})
    assert torch.equal(states(path)["a"], torch.ones(2, 3))


def test_merge_reads_and_functions_write_urls(tmp_path: Path) -> None:
    save_sharded(checkpoint(1.0), URL, None)
    main(["merge", URL, str(tmp_path / "whole.ckpt")])
    merged = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert torch.equal(merged["state_dict"]["a"], torch.ones(2, 3))
    save_full(merged, "memory://bucket/whole.ckpt")
    assert torch.equal(states("memory://bucket/whole.ckpt")["a"], torch.ones(2, 3))


def test_a_strategy_writes_there_but_not_with_options() -> None:
    trainer = make_trainer(strategy=PipelineStrategy(), devices=2)
    trainer.strategy.connect(make_module())
    trainer.save_checkpoint(URL)
    assert is_sharded(URL)
    with pytest.raises(ValueError, match="save_full=True"):
        trainer.save_checkpoint(URL, storage_options={"key": "value"})
