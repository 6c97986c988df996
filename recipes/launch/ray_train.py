"""Train a recipe on the workers of Ray Train.

.. code-block:: bash

    pip install 'lightning-dist[ray]'
    python -m recipes.launch.ray_train --workers=2 \
        --config=recipes/configs/gpt_1f1b.yaml --config=recipes/launch/tiny.yaml

Further words go to :mod:`recipes.train`. Ray starts the processes, makes the process group and
knows the ranks, which ``RayLightningEnvironment`` passes on. So ``devices="auto"`` is the right
word: the strategy takes the processes that there are. Ray's ``prepare_trainer`` is left out, since
it accepts Ray's own strategies only and changes nothing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypedDict

import ray.train
from ray.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.lightning import RayTrainReportCallback
from ray.train.torch import TorchConfig, TorchTrainer

OPTIONS = (
    "--trainer.devices=auto",
    "--trainer.plugins+=ray.train.lightning.RayLightningEnvironment",
    # Reports metrics and a checkpoint after each epoch.
    "--trainer.callbacks+=ray.train.lightning.RayTrainReportCallback",
)
"""What the recipe is told of Ray."""


class Loop(TypedDict):
    """The words that each worker gives to ``recipes.train fit``."""

    words: list[str]


def train(loop: Loop) -> None:
    """Trains in one worker; called by Ray."""
    from recipes.command_line import run

    sys.argv = ["recipes.train", "fit", *loop["words"], *OPTIONS]
    latest = ray.train.get_checkpoint()
    if latest is None:
        return run()
    with latest.as_directory() as folder:  # this attempt follows one that has failed
        sys.argv.append(f"--ckpt_path={Path(folder, RayTrainReportCallback.CHECKPOINT_NAME)}")
        return run()


def launch(words: list[str], *, workers: int, storage: Path, use_gpu: bool = False) -> Result:
    """Trains on Ray's workers.

    Args:
        words: Words for ``recipes.train fit``. Paths among them must be absolute, since a worker
            runs in a folder of its own.
        workers: Number of processes.
        storage: Where Ray keeps the checkpoints; on several hosts, a folder that all of them see.
        use_gpu: Whether each worker has a GPU.

    Returns:
        The latest metrics and checkpoint.
    """
    trainer = TorchTrainer(
        train,
        train_loop_config=Loop(words=words),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        torch_config=TorchConfig(backend="nccl" if use_gpu else "gloo"),
        run_config=RunConfig(
            storage_path=str(storage.absolute()),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    return trainer.fit()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, action="append", default=[], help="may be repeated")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--use-gpu", action="store_true", help="one GPU for each worker")
    parser.add_argument("--storage", type=Path, default=Path("runs/ray"), help="for checkpoints")
    given, words = parser.parse_known_args()
    # As texts, which need no disk that the workers see.
    configs = [f"--config={path.read_text()}" for path in given.config]
    logs = f"--trainer.logger.init_args.save_dir={given.storage.absolute()}"
    result = launch(
        [*configs, logs, *words],
        workers=given.workers,
        storage=given.storage,
        use_gpu=given.use_gpu,
    )
    print(f"{result.checkpoint}: {result.metrics}")


if __name__ == "__main__":
    main()
