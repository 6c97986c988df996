"""A checkpoint of ranks that hold the whole model is one ordinary file."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import Strategy

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.__main__ import main
from lightning_dist.engine.checkpoint import directory
from lightning_dist.engine.checkpoint.files import is_sharded, load_full
from lightning_dist.strategies.base.saving import checkpointing
from tests.helpers.networks.models import Classifier, make_module, make_trainer


def test_lightning_does_not_count_a_checkpoint_that_is_being_written(tmp_path: Path) -> None:
    connector = make_trainer(default_root_dir=tmp_path)._checkpoint_connector
    one, two = (tmp_path / f"hpc_ckpt_{number}.ckpt" for number in (1, 2))
    one.touch()
    directory.temporary_name(two).touch()  # as a job that was killed in its save leaves it
    assert connector._hpc_resume_path == str(one)
    assert connector.hpc_save_path(tmp_path) == str(two)


def saved_before_fit(strategy: Strategy, devices: int, path: Path) -> Any:
    module = make_module()
    trainer = make_trainer(strategy=strategy, devices=devices)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(path)
    return module


@pytest.mark.parametrize(
    ("make", "devices"),
    [
        (DDPStrategy, 1),
        (DDPStrategy, 2),
        (FSDPStrategy, 1),
        (TensorParallelStrategy, 1),
        (PipelineStrategy, 1),
        (MeshStrategy, 1),
        (partial(MeshStrategy, dp_replicate=2), 2),
        (partial(PipelineStrategy, save_full=True), 2),
    ],
)
def test_before_a_run_the_whole_model_is_saved_to_a_file(
    tmp_path: Path, make: Callable[[], Strategy], devices: int
) -> None:
    path = tmp_path / "folder" / "some.ckpt"
    module = saved_before_fit(make(), devices, path)
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"].keys() == module.state_dict().keys()
    loaded = Classifier.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(saved["state_dict"][name], value), name
        assert torch.equal(loaded.double().state_dict()[name], value), name
    assert [p.name for p in path.parent.iterdir()] == ["some.ckpt"]


@pytest.mark.parametrize(
    ("make", "devices"),
    [
        (partial(DDPStrategy, save_full=False), 1),
        (PipelineStrategy, 2),
        (FSDPStrategy, 2),
        (TensorParallelStrategy, 2),
        (partial(MeshStrategy, pp=2), 2),
    ],
)
def test_elsewhere_it_is_saved_to_a_directory(
    tmp_path: Path, make: Callable[[], Strategy], devices: int
) -> None:
    module = saved_before_fit(make(), devices, tmp_path / "some.ckpt")
    assert is_sharded(tmp_path / "some.ckpt")
    saved = load_full(tmp_path / "some.ckpt")["state_dict"]
    assert saved.keys() == module.state_dict().keys()
    assert all(torch.equal(saved[n], value) for n, value in module.state_dict().items())


def test_a_directory_says_how_to_make_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(checkpointing, "rank_zero_info", told.append)
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(strategy=PipelineStrategy(), devices=2)
    trainer.strategy.connect(make_module())
    for name in ("epoch=0 a.ckpt", "epoch=1.ckpt"):
        trainer.save_checkpoint(tmp_path / name)
    (line,) = told  # the first time
    command = "python -m lightning_dist merge 'epoch=0 a.ckpt' whole.ckpt"
    assert line.startswith("Checkpoints are directories, for `ckpt_path`")
    assert command in line
    assert command in (tmp_path / "epoch=0 a.ckpt" / "README.txt").read_text()
    main(shlex.split(command)[3:])
    Classifier.load_from_checkpoint("whole.ckpt", weights_only=True)


class Elsewhere(TorchCheckpointIO):
    """Writes what it gets beside its path."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, f"{path}.{storage_options}")


def test_the_plugin_of_the_user_writes_the_file(tmp_path: Path) -> None:
    module = make_module()
    trainer = make_trainer(strategy=DDPStrategy(), devices=1, plugins=[Elsewhere()])
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "some.ckpt", storage_options="there")
    assert [p.name for p in tmp_path.iterdir()] == ["some.ckpt.there"]


def test_a_plugin_that_no_rank_would_ask_is_refused() -> None:
    with pytest.raises(ValueError, match="AsyncCheckpointIO would not be asked"):
        make_trainer(strategy=PipelineStrategy(), devices=2, plugins=[AsyncCheckpointIO()])
    make_trainer(
        strategy=PipelineStrategy(save_full=True), devices=2, plugins=[AsyncCheckpointIO()]
    )
