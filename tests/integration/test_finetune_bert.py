"""Fine-tuning a BERT under each strategy is what it is on one device; the weights are random."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import yaml

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from recipes.docstring_data import DocstringDataModule
from recipes.docstrings import Docstring, load_docstrings
from recipes.finetune_bert import BertClassifier
from tests.helpers.networks.models import make_trainer
from tests.helpers.networks.tiny_bert import save_tiny_bert
from tests.helpers.processes.workers import WorkerPool
from tests.integration.test_recipes import run_in_pool

BLOCKS = "model.encoder.encoder.layer"
CONFIGS = sorted(Path("recipes/configs").glob("bert_*.yaml"))
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "tp": TensorParallelStrategy,
    "mesh": lambda: MeshStrategy(dp_shard=2, tp=2),
    "stages": lambda: PipelineStrategy(layers=BLOCKS, num_microbatches=2),
    "mesh with stages": lambda: MeshStrategy(
        pp=2, dp_shard=1, tp=2, pipeline=PipelineConfig(num_microbatches=2, layers=BLOCKS)
    ),
}


class Losses(L.Callback):
    """Keeps each step's loss."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *batch: Any
    ) -> None:
        self.values.append(float(outputs["loss"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def docstrings() -> list[Docstring]:
    """Read once: each process would take a second for it."""
    return load_docstrings()


def given(docstrings: list[Docstring]) -> Any:
    return patch("recipes.docstring_data.load_docstrings", return_value=docstrings)


def finetune(
    docstrings: list[Docstring], folder: str, name: str, num_ranks: int, batch_size: int
) -> tuple[list[float], float]:
    """Three steps, large ones so that a wrong gradient shows, and a validation."""
    losses = Losses()
    trainer = make_trainer(
        devices=num_ranks, strategy=STRATEGIES[name](), max_steps=3, callbacks=[losses]
    )
    torch.manual_seed(7)
    module = BertClassifier(folder, dropout=0.0, learning_rate=1e-2, warmup_steps=0).double()
    with given(docstrings):
        data = DocstringDataModule(folder, batch_size=batch_size, sequence_length=16)
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        trainer.fit(module, data)
        (metrics,) = trainer.validate(module, data, verbose=False)
    return losses.values, metrics["val_loss"]


@pytest.fixture(scope="module")
def alone(
    workers: WorkerPool, docstrings: list[Docstring], folder: str
) -> tuple[list[float], float]:
    ((losses, val_loss),) = workers.run(1, finetune, docstrings, folder, "one", 1, 16)
    assert len(losses) == 3
    assert len(set(losses)) == 3
    return losses, val_loss


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_replicas"),
    [
        *(("tp", 2, 1), ("fsdp", 2, 2), ("ddp", 2, 2), ("mesh", 4, 2)),
        *(("stages", 2, 1), ("mesh with stages", 4, 1)),
    ],
)
def test_three_steps_equal_those_of_one_device(
    workers: WorkerPool,
    docstrings: list[Docstring],
    folder: str,
    alone: tuple[list[float], float],
    name: str,
    num_ranks: int,
    num_replicas: int,
) -> None:
    # Losses, not weights: a key's bias has no gradient but rounding noise, which AdamW blows up.
    share = 16 // num_replicas
    results = workers.run(num_ranks, finetune, docstrings, folder, name, num_ranks, share)
    means = torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(dim=0)
    assert means.tolist() == pytest.approx(alone[0], abs=1e-9)
    for _, val_loss in results:
        assert val_loss == pytest.approx(alone[1], abs=1e-9)


def run_config(docstrings: list[Docstring], arguments: list[str]) -> str:
    with given(docstrings):
        return run_in_pool(arguments)


@pytest.mark.some("bert_tp")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_trains_and_tests(
    workers: WorkerPool, docstrings: list[Docstring], folder: str, config: Path, tmp_path: Path
) -> None:
    arguments = [
        *("fit", f"--config={config}", f"--trainer.logger.init_args.save_dir={tmp_path}"),
        *("--trainer.max_epochs=1", "--trainer.limit_train_batches=2"),
        *("--trainer.limit_val_batches=1", "--trainer.enable_progress_bar=false"),
        *(f"--model.folder={folder}", f"--data.folder={folder}", "--data.sequence_length=16"),
    ]
    num_devices = yaml.safe_load(config.read_text())["trainer"]["devices"]
    output, *others = workers.run(num_devices, run_config, docstrings, arguments)
    assert not any("Run summary" in other for other in others)
    for row in ("test accuracy", "bag of words baseline", "majority baseline", "2 steps in"):
        assert row in output
    assert "It is recommended" not in output  # no docstring is counted twice
    (checkpoint,) = (tmp_path / config.stem / "version_0" / "checkpoints").iterdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what Lightning's command line does there
        module = BertClassifier.load_from_checkpoint(checkpoint)
    assert module.model.logits.weight.shape == (4, 32)
