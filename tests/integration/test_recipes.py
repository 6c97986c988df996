"""The recipe's command line, in real processes as a user would start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_dist.checkpoint import load_full

CONFIGS = sorted(Path("recipes/configs").glob("*.yaml"))
SHORT = [
    "--trainer.max_epochs=1",
    "--data.train_samples=160",
    "--model.width=16",
    "--trainer.log_every_n_steps=1",
    "--model.warmup_steps=2",
    "--trainer.limit_val_batches=3",
    "--trainer.enable_progress_bar=false",
]


def run(*command: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE")}
    result = subprocess.run(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        env={**environment, "COLUMNS": "100"},
        check=False,
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def fit(config: Path, root: Path, *extra: str, launcher: tuple[str, ...] = ("-m",)) -> str:
    logger = f"--trainer.logger.init_args.save_dir={root}"
    return run(*launcher, "recipes.train", "fit", f"--config={config}", *SHORT, logger, *extra)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_trains(config: Path, tmp_path: Path) -> None:
    output = fit(config, tmp_path)
    version = tmp_path / config.stem / "version_0"
    assert "bigram baseline" in output
    assert "tokens per second" in output
    metrics = (version / "metrics.csv").read_text().splitlines()
    assert "train_loss" in metrics[0]
    assert "val_bits_per_byte" in metrics[0]
    assert "It is recommended" not in output  # of what is done for the user anyway
    (checkpoint,) = (version / "checkpoints").iterdir()
    assert load_full(checkpoint)["global_step"] == 5
    has_pipeline = config.stem != "gpt_single"
    assert ("bubble fraction" in output) == has_pipeline
    assert (version / "timeline.png").exists() == has_pipeline
    if has_pipeline:
        assert json.loads((version / "trace.json").read_text())["traceEvents"]


def test_the_same_config_runs_on_one_device(tmp_path: Path) -> None:
    config = Path("recipes/configs/gpt_pipedream.yaml")
    output = fit(config, tmp_path, "--trainer.strategy=auto", "--trainer.devices=1")
    assert "bubble fraction" not in output


def test_the_same_config_runs_under_torchrun(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m")
    output = fit(Path("recipes/configs/gpt_pipedream.yaml"), tmp_path, launcher=launcher)
    assert output.count("Run summary") == 1


def test_help_reads_well() -> None:
    text = run(
        "-m", "recipes.train", "fit", "--trainer.strategy.help", "lightning_dist.PipelineStrategy"
    )
    for dial in ("num_stages", "schedule", "num_microbatches", "partition", "timeout_s"):
        assert f"--trainer.strategy.{dial}" in text
    assert "the backward of a batch" in " ".join(text.split())
