"""Ray Train's workers under each strategy, where Ray is installed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_dist.checkpoint import load_full
from tests.helpers.processes.workers import WorkerPool
from tests.integration.launch.common import ROOT, words
from tests.integration.test_recipes import run_in_pool

pytestmark = [
    pytest.mark.long,
    # Of Ray's own, at its import and while it ends.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]

CONFIGS = {
    **dict.fromkeys(["gpt_1f1b", "gpt_zbv", "gpt_pipedream", "gpt_2bw", "gpt_ddp_powersgd"], []),
    **dict.fromkeys(["gpt_fsdp", "gpt_tp"], []),
    "gpt_mesh_2x2": ["--trainer.strategy.init_args.tp=1"],  # and two shards
}


@pytest.fixture(scope="module")
def ray_train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="pip install '.[ray]'")
    from recipes.launch import ray_train

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray_train
    ray.shutdown()


class KilledOnce(L.Callback):
    """Kills rank 1 in its second epoch, unless it has been killed before.

    Args:
        mark: A file to make then.
    """

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1 and trainer.global_rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def arguments_of(config: str, folder: Path) -> list[str]:
    given = [*words(folder, config), *CONFIGS[config]]
    return [word.replace("=recipes/", f"={ROOT}/recipes/") for word in given]  # in any folder


def train_each(loop: dict[str, list[list[str]]]) -> None:
    """Trains one recipe after another in the same workers, whose start takes longest."""
    from recipes.launch.ray_train import OPTIONS

    for arguments in loop["each"]:
        run_in_pool(["fit", *arguments, *OPTIONS])


def trained(workers: WorkerPool, folder: Path, arguments: list[str]) -> dict[str, Any]:
    """Trains without Ray."""
    run = ["fit", *arguments, "--trainer.devices=2"]
    workers.run(2, run_in_pool, [*run, f"--trainer.logger.init_args.save_dir={folder}"])
    (checkpoint,) = folder.rglob("*.ckpt")
    return load_full(checkpoint)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["global_step"] == expected["global_step"]
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-5, atol=1e-6)


def test_two_workers_train_each_strategy(
    ray_train: Any, workers: WorkerPool, tmp_path: Path
) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    each = {config: arguments_of(config, tmp_path / "ray") for config in CONFIGS}
    trainer = TorchTrainer(
        train_each,
        train_loop_config={"each": list(each.values())},
        scaling_config=ScalingConfig(num_workers=2),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    result = trainer.fit()
    assert len(result.best_checkpoints) == len(CONFIGS)  # what the callback has reported
    for (config, arguments), (reported, metrics) in zip(
        each.items(), result.best_checkpoints, strict=True
    ):
        assert metrics["step"] == 4, config
        expected = trained(workers, tmp_path / config, arguments)
        assert_equal(load_full(Path(reported.path, "checkpoint.ckpt")), expected)


def test_a_killed_worker_is_started_again(
    ray_train: Any, workers: WorkerPool, tmp_path: Path
) -> None:
    arguments = [*arguments_of("gpt_1f1b", tmp_path), "--trainer.max_epochs=2"]
    callback = f"--trainer.callbacks+={KilledOnce.__module__}.KilledOnce"
    mark = f"--trainer.callbacks.mark={tmp_path / 'mark'}"
    result = ray_train.launch([*arguments, callback, mark], workers=2, storage=tmp_path)
    assert (tmp_path / "mark").exists()
    found = load_full(Path(result.checkpoint.path, "checkpoint.ckpt"))
    assert_equal(found, trained(workers, tmp_path / "expected", arguments))
