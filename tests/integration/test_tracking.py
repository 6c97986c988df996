"""A run tracked by W&B, offline: all that it shows, and a checkpoint that is used again."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import wandb
import yaml

from lightning_dist.checkpoint import load_full
from tests.helpers.processes.workers import WorkerPool
from tests.integration.callbacks.test_media import QUIET, inspect
from tests.integration.test_recipes import WANDB, run_in_pool

SHORT = [
    "--trainer.limit_train_batches=12",
    "--trainer.limit_val_batches=1",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
    "--model.width=16",
    "--data.batch_size=8",
    "--data.sequence_length=32",
]
EARLY: dict[str, dict[str, Any]] = {
    "StepProfiler": {"active_steps": 2, "warmup_steps": 1},
    "StageBalancer": {"every_n_steps": 6, "measured_steps": 2, "warmup_steps": 1},
}


def write_config(folder: Path) -> str:
    """Writes the recipe's configuration, with its folder in this one and early reports."""
    config = yaml.safe_load(WANDB.read_text().replace("runs/gpt_wandb", str(folder)))
    for callback in config["trainer"]["callbacks"]:
        name = callback["class_path"].rpartition(".")[2]
        callback.setdefault("init_args", {}).update(EARLY.get(name, {}))
    path = folder / "config_of_test.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


def fit(config: str, folder: str, *more: str) -> None:
    os.environ.update(QUIET, WANDB_DATA_DIR=folder, WANDB_CACHE_DIR=folder)
    try:
        with chdir(folder):
            run_in_pool(["fit", f"--config={config}", *SHORT, *more])
    finally:
        wandb.finish()


def read_records(run: Path) -> list[dict[str, Any]]:
    """Reads the records of a run with the public tool."""
    tool = Path(sys.executable).parent / "wandb"
    command = [tool, "leet", "inspect", "--json", run]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


KINDS = ("history", "stats", "artifact")


def names(entry: dict[str, Any]) -> set[str]:
    """Returns what a record of the history has; parts of pictures are under their name."""
    return {name.partition(".")[0] for name in entry.get("item", entry)}


@dataclass
class LoggedArtifact:
    """Downloads an artifact from where an offline run keeps its files."""

    record: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.record['name']}:v0"

    @property
    def digest(self) -> str:
        return str(self.record["digest"])

    def download(self, root: str) -> str:
        for entry in self.record["manifest"]["contents"]:
            target = Path(root, entry["path"])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(entry["local_path"], target)
        with Path("downloads.txt").open("a") as file:
            file.write(f"{os.environ['RANK']}\n")
        return root


def resume(record: dict[str, Any], config: str, folder: str, *more: str) -> None:
    class Api:
        def artifact(self, name: str, type: str) -> LoggedArtifact:
            assert (name, type) == (f"me/lightning_dist/{record['name']}:best", "model")
            return LoggedArtifact(record)

    with patch("wandb.Api", Api):
        address = f"wandb:me/lightning_dist/{record['name']}:best"
        fit(config, folder, f"--ckpt_path={address}", *more)


@pytest.mark.long
def test_a_tracked_run_has_all_of_it_and_goes_on_from_its_artifact(
    workers: WorkerPool, tmp_path: Path
) -> None:
    config, folder = write_config(tmp_path), str(tmp_path)
    workers.run(2, fit, config, folder, "--trainer.max_epochs=1", timeout=120)
    (run,) = tmp_path.rglob("*.wandb")
    records = read_records(run)
    of_type = {kind: [r[kind] for r in records if r["type"] == kind] for kind in KINDS}
    logged = {name for entry in of_type["history"] for name in names(entry)}
    curves = {"train_loss", "val_bits_per_byte", "profile/bubble_fraction", "balance/gain"}
    assert curves <= logged
    assert any(name.startswith("lr-AdamW") for name in logged)
    media = {"profile/timeline", "profile/page", "profile/spans", "balance/layers"}
    assert media <= logged
    assert any("proc.memory.rssMB" in entry["item"] for entry in of_type["stats"])
    hyperparameters = inspect(run)["config"]
    assert hyperparameters["versions"]["torch"] == torch.__version__
    assert hyperparameters["mesh"] == {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    assert hyperparameters["config"]["trainer"]["strategy"]["init_args"]["partition"] == [3, 3]
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    (artifact,) = [a for a in of_type["artifact"] if a["name"].startswith("checkpoint-")]
    assert sorted(artifact["aliases"]) == ["best", "latest"]
    assert json.loads(artifact["metadata"])["original_filename"] == checkpoint.name
    assert {entry["path"] for entry in artifact["manifest"]["contents"]} == {
        str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()
    }
    before = load_full(checkpoint)["state_dict"]
    shutil.rmtree(checkpoint)  # all that is left of it is the artifact
    workers.run(2, resume, artifact, config, folder, "--trainer.max_epochs=2", timeout=120)
    assert (tmp_path / "downloads.txt").read_text() in ("0\n", "1\n")  # one rank did
    (downloaded,) = (tmp_path / "runs" / "wandb_checkpoints").glob("checkpoint-*")
    after = load_full(downloaded)["state_dict"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    saved = [load_full(path) for path in (tmp_path / "checkpoints").iterdir()]
    assert {loaded["global_step"] for loaded in saved} == {24}
