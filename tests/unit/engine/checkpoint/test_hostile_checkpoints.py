"""No file of a checkpoint runs code where it is loaded."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import StorageMeta

from lightning_dist.__main__ import main
from lightning_dist.engine.checkpoint.files import load_full, save_full, save_sharded

STATE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}


class Hostile:
    """Runs a command where it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.witness}",)


def index_that_is(path: Path, hostile: Hostile) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(hostile))


def index_that_holds(path: Path, hostile: Hostile) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = hostile
    (path / ".metadata").write_bytes(pickle.dumps(index))


def index_of_an_old_protocol(path: Path, hostile: Hostile) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(hostile, protocol=0))


def rest_that_holds(path: Path, hostile: Hostile) -> None:
    rest = torch.load(path / "lightning.pt", weights_only=True)
    torch.save({**rest, "hostile": hostile}, path / "lightning.pt")


def shard_that_is(path: Path, hostile: Hostile) -> None:
    """Puts a hostile pickle where the first tensor of a shard was."""
    (shard,) = path.glob("*.distcp")
    index = pickle.loads((path / ".metadata").read_bytes())
    where = next(iter(index.storage_data.values()))
    whole = bytearray(shard.read_bytes())
    entry = io.BytesIO(whole[where.offset : where.offset + where.length])
    out = io.BytesIO()
    with zipfile.ZipFile(entry) as before, zipfile.ZipFile(out, "w") as after:
        for item in before.infolist():
            is_pickle = item.filename.endswith("data.pkl")
            after.writestr(item, pickle.dumps(hostile, 2) if is_pickle else before.read(item))
    shard.write_bytes(whole + out.getvalue())
    where.offset, where.length = len(whole), len(out.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(index))


ATTACKS = [
    index_that_is,
    index_that_holds,
    index_of_an_old_protocol,
    rest_that_holds,
    shard_that_is,
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "some.ckpt"
    save_sharded({"state_dict": STATE, "epoch": 3}, path, None)
    return path


def test_what_is_not_hostile_loads(saved: Path) -> None:
    loaded = load_full(saved)
    assert loaded["epoch"] == 3
    assert loaded["state_dict"].keys() == STATE.keys()
    assert all(torch.equal(loaded["state_dict"][name], value) for name, value in STATE.items())


@pytest.mark.parametrize("attack", ATTACKS)
def test_loading_runs_no_code(
    saved: Path, tmp_path: Path, attack: Callable[[Path, Hostile], None]
) -> None:
    witness = tmp_path / "witness"
    attack(saved, Hostile(witness))
    with pytest.raises((ValueError, pickle.UnpicklingError), match=r"posix\W+system|os\.system"):
        load_full(saved)
    assert not witness.exists()


@pytest.mark.parametrize("attack", ATTACKS)
def test_merging_runs_no_code(
    saved: Path,
    tmp_path: Path,
    attack: Callable[[Path, Hostile], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    witness = tmp_path / "witness"
    attack(saved, Hostile(witness))
    with pytest.raises(SystemExit):
        main(["merge", str(saved), str(tmp_path / "merged.ckpt")])
    assert "system" in capsys.readouterr().err
    assert not witness.exists()
    assert not (tmp_path / "merged.ckpt").exists()


def test_an_ordinary_file_runs_no_code(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    save_full({"state_dict": {}, "hostile": Hostile(witness)}, tmp_path / "some.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        load_full(tmp_path / "some.ckpt")
    assert not witness.exists()


def test_the_attacks_would_run_code_in_torchs_reader(saved: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    index_that_holds(saved, Hostile(witness))
    torch.distributed.checkpoint.FileSystemReader(saved).read_metadata()
    assert witness.exists()


def test_only_the_trusting_read_other_objects(saved: Path, tmp_path: Path) -> None:
    rest = torch.load(saved / "lightning.pt", weights_only=True)
    torch.save({**rest, "range": range(3)}, saved / "lightning.pt")
    target = tmp_path / "merged.ckpt"
    main(["merge", "--unpickle", str(saved), str(target)])
    assert torch.load(target, weights_only=False)["range"] == range(3)


def test_an_index_changes_no_class(saved: Path) -> None:
    index = (saved / ".metadata").read_bytes()
    # A pair that is the state of a class sets the class's attributes.
    build = (
        pickle.PROTO + b"\x04c" + b"torch.distributed.checkpoint.metadata\nMetadata\n"
        b"(N}\x8c\x05stateK\x01stb."
    )
    (saved / ".metadata").write_bytes(build)
    with pytest.raises(ValueError, match="no index of shards.*missing 1 required"):
        load_full(saved)
    (saved / ".metadata").write_bytes(index)
    assert load_full(saved)["epoch"] == 3


@pytest.mark.parametrize("name", ["../some.ckpt", "/etc/passwd", "folder/shard.distcp", 3])
def test_a_shard_lies_in_the_directory(saved: Path, name: Any) -> None:
    index = pickle.loads((saved / ".metadata").read_bytes())
    for place in index.storage_data.values():
        place.relative_path = name
    (saved / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match="not in the checkpoint's directory"):
        load_full(saved)


@pytest.mark.parametrize("index", [b"", b"text", pickle.dumps(None), pickle.dumps(StorageMeta())])
def test_a_damaged_index_is_named(saved: Path, index: bytes) -> None:
    (saved / ".metadata").write_bytes(index)
    with pytest.raises(ValueError, match=r"\.metadata is no index of shards that torch writes"):
        load_full(saved)
