"""The recipe's command line: started as a user would, and each configuration in the pool."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from lightning_dist import DDPStrategy
from lightning_dist.checkpoint import load_full
from recipes import study_staleness
from recipes.catalog import find_recipes
from recipes.command_line import run
from recipes.digits import DigitsDataModule, LabelledImages, load_images
from recipes.resnet import ResNet
from recipes.staleness.results import Results
from recipes.staleness.training import Look, Sizes
from recipes.staleness.trial import SYNC, TWO_VERSIONS, Trial
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

DIGITS = Path("recipes/configs/digits_ddp.yaml")
WANDB = Path("recipes/configs/gpt_wandb.yaml")  # whose logger is not CSV's: test_tracking.py
CONFIGS = sorted(set(Path("recipes/configs").glob("gpt_*.yaml")) - {WANDB})
OTHERS = {
    path: recipe
    for path, recipe in find_recipes().items()
    if path.name not in {config.name for config in (*CONFIGS, DIGITS)}
}
SCRIPTS = {path: r for path, r in OTHERS.items() if "recipes.train" not in r.command}
# Whose parts other tests of the test command run.
LONG = ("stream_gpt", "tune_gpt", "unet_trace")
SHORT = [
    "--trainer.max_epochs=1",
    "--data.train_samples=96",
    "--model.width=16",
    "--trainer.log_every_n_steps=1",
    "--model.warmup_steps=2",
    "--trainer.limit_val_batches=3",
    "--trainer.enable_progress_bar=false",
]
SHORT_DIGITS = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=1",
    "--model.width=8",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
]
# Where a part of a configuration would only begin after more steps than these tests take.
EARLIER = {"gpt_ddp_powersgd": ["--trainer.strategy.init_args.powersgd_start_step=2"]}
# Operations on shards of shards cost most, on eight processes above all.
SMALLER = {"gpt_mesh_2x2": ["--model.depth=2"], "gpt_mesh_2x2x2": ["--model.depth=2"]}


def words(config: Path, root: Path, *extra: str) -> list[str]:
    logger = f"--trainer.logger.init_args.save_dir={root}"
    return ["fit", f"--config={config}", *SHORT, logger, *extra]


def run_in_pool(arguments: list[str], main: Callable[[], object] = run) -> str:
    """Runs a command line in a process that is there already, as torchrun's would be."""
    before, output = sys.argv, io.StringIO()
    sys.argv = ["recipes", *arguments]
    os.environ["COLUMNS"] = "100"
    try:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(output):
            warnings.simplefilter("always")
            main()
    except SystemExit as end:  # a help does so, with code 0
        if end.code:
            raise
    finally:
        sys.argv = before
    return output.getvalue() + "".join(str(warning.message) for warning in caught)


# Eight processes are three axes at once, as in mesh/test_parity.py.
@pytest.mark.some("gpt_fsdp", "gpt_mesh_2x2", "gpt_pipedream", "gpt_tp", "gpt_zbv")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_each_config_trains(workers: WorkerPool, config: Path, tmp_path: Path) -> None:
    arguments = words(
        config, tmp_path, *EARLIER.get(config.stem, []), *SMALLER.get(config.stem, [])
    )
    num_devices = yaml.safe_load(config.read_text())["trainer"]["devices"]
    output, *others = workers.run(num_devices, run_in_pool, arguments)
    assert not any("Run summary" in other for other in others)
    version = tmp_path / config.stem / "version_0"
    assert "bigram baseline" in output
    assert "tokens per second" in output
    metrics = (version / "metrics.csv").read_text().splitlines()
    assert "train_loss" in metrics[0]
    assert "val_bits_per_byte" in metrics[0]
    assert "It is recommended" not in output  # of what is done for the user anyway
    (checkpoint,) = (version / "checkpoints").iterdir()
    assert load_full(checkpoint)["global_step"] == 3
    has_pipeline = any(word in config.read_text() for word in ("PipelineStrategy", "pp: 2"))
    assert ("bubble fraction" in output) == has_pipeline
    assert (version / "timeline.png").exists() == has_pipeline
    if has_pipeline:
        assert json.loads((version / "trace.json").read_text())["traceEvents"]


def test_the_digits_are_trained_and_tested_on_two_replicas(
    workers: WorkerPool, tmp_path: Path
) -> None:
    logger = f"--trainer.logger.init_args.save_dir={tmp_path}"
    output, _ = workers.run(2, run_in_pool, ["fit", f"--config={DIGITS}", *SHORT_DIGITS, logger])
    version = tmp_path / "digits_ddp" / "version_0"
    assert output.count("Run summary") == 1
    assert "of 360 images" in output
    assert "It is recommended" not in output  # no image is counted twice
    assert (version / "confusion.png").exists()
    header = (version / "metrics.csv").read_text().splitlines()[0]
    for metric in ("train_loss", "val_loss", "val_accuracy", "test_accuracy"):
        assert metric in header
    (checkpoint,) = (version / "checkpoints").iterdir()
    assert torch.load(checkpoint, weights_only=True)["global_step"] == 3  # one ordinary file


def odd_digits() -> DigitsDataModule:
    """Shares of 120 and 119 images, and of 181 and 180: the samplers must not pad them."""
    data = DigitsDataModule(batch_size=32)
    images, labels = load_images()
    images = images.double()
    data._val = LabelledImages(images[:239], labels[:239])
    data._test = LabelledImages(images[239:600], labels[239:600])
    return data


def evaluate_digits() -> tuple[dict[str, float], Tensor, Tensor]:
    torch.manual_seed(0)
    module = ResNet(width=8).double()
    images, labels = load_images()
    images = images.double()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(30):  # a fresh network takes all digits for one
        F.cross_entropy(module(images[600:700]), labels[600:700]).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.eval()
    with torch.no_grad():
        logits = module(images[:600])
    trainer = make_trainer(devices=2, strategy=DDPStrategy(), use_distributed_sampler=True)
    (validation,) = trainer.validate(module, odd_digits(), verbose=False)
    (test,) = trainer.test(module, odd_digits(), verbose=False)
    return {**validation, **test}, module.test_confusion.compute(), logits


def test_metrics_of_two_replicas_are_those_of_one_device(workers: WorkerPool) -> None:
    labels = load_images()[1][:600]
    for metrics, confusion, logits in workers.run(2, evaluate_digits):
        right = logits.argmax(-1) == labels
        assert 0.4 < right.float().mean() < 0.95
        assert metrics["val_accuracy"] == right[:239].float().mean()
        loss = F.cross_entropy(logits[:239], labels[:239])
        assert metrics["val_loss"] == pytest.approx(float(loss), rel=1e-12)
        assert metrics["test_accuracy"] == right[239:].float().mean()
        assert confusion.sum(dim=1).tolist() == labels[239:].bincount().tolist()
        assert confusion.diagonal().sum() == right[239:].sum()


def test_the_same_config_runs_on_one_device(workers: WorkerPool, tmp_path: Path) -> None:
    config = Path("recipes/configs/gpt_pipedream.yaml")
    plain = ("--trainer.strategy=auto", "--trainer.devices=1")
    (output,) = workers.run(1, run_in_pool, words(config, tmp_path, *plain))
    assert "bigram baseline" in output
    assert "bubble fraction" not in output


def test_help_reads_well(workers: WorkerPool) -> None:
    strategy = ("--trainer.strategy.help", "lightning_dist.PipelineStrategy")
    (text,) = workers.run(1, run_in_pool, ["fit", *strategy])
    for dial in ("num_stages", "schedule", "num_microbatches", "partition", "timeout_s"):
        assert f"--trainer.strategy.{dial}" in text
    assert "takes those of the batch's forward" in " ".join(text.split())


@pytest.mark.long
def test_the_study_of_stale_weights_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = Sizes(num_updates=2, num_looks=2)
    known = Trial(SYNC, "adamw", num_stages=1, rate_factor=1.0, seed=0)
    Results(tmp_path / "results.csv", sizes).add(known, [Look(1, 7.5), Look(2, 7.25)])
    words = f"--tokens={2 * sizes.batch_tokens} --looks=2 --seeds=1 --stages=2 --rates=1 --jobs=1"
    options = ["--optimizers=adamw", "--only", "sync", "2bw"]
    study_staleness.main([*words.split(), f"--out={tmp_path}", *options])
    printed = capsys.readouterr().out
    assert "adamw 2bw on 2 stages" in printed
    assert "adamw sync on 1 stages" not in printed
    read = Results(tmp_path / "results.csv", sizes)
    late = read.curve(Trial(TWO_VERSIONS, "adamw", num_stages=2, rate_factor=1.0, seed=0))
    assert 8.1 > late[0].bits_per_byte > late[1].bits_per_byte > 6.0
    assert "| sync, 1f1b | 7.250 | " in (tmp_path / "table.md").read_text()
    assert (tmp_path / "adamw.png").exists()


def run_words(words: list[str], folder: Path) -> str:
    """Runs the words of a recipe's command in the pool."""
    module, *arguments = words[len(words) - words[::-1].index("-m") :]
    if module == "recipes.train":  # which writes to ./runs
        with contextlib.chdir(folder):
            return run_in_pool(arguments)
    return run_in_pool(arguments, importlib.import_module(module).main)


@pytest.mark.some("bert_fsdp", "bert_mesh_2x2", "bert_tp", "gpt_wandb", "lora_bert", "serve_gpt")
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] if path.stem in LONG else [])
        for path in OTHERS
    ],
)
def test_each_other_recipe_runs_a_few_steps(
    workers: WorkerPool, config: Path, tmp_path: Path
) -> None:
    recipe = OTHERS[config]
    if install := recipe.missing():
        pytest.skip(f"{config.stem} needs: {install}")
    options = [*recipe.few_steps]
    if config in SCRIPTS:
        num_ranks = 2 if recipe.command.startswith("torchrun") else 1
        options += [f"--out={tmp_path}"] if "recipes." in recipe.command else []
    else:
        num_ranks = yaml.safe_load(config.read_text())["trainer"]["devices"]
    words = recipe.words(config, options)
    output, *_ = workers.run(num_ranks, run_words, words, tmp_path, timeout=120.0)
    assert recipe.result is not None
    assert math.isfinite(recipe.result.read(output))  # as `make recipes` reads it


@pytest.mark.long
@pytest.mark.parametrize("config", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_runs_a_few_steps_as_a_recipe(config: Path, tmp_path: Path) -> None:
    if install := SCRIPTS[config].missing():
        pytest.skip(f"{config.stem} needs: {install}")
    writes = "recipes." in SCRIPTS[config].command
    options = [f"--out={tmp_path}"] if writes else []
    command = [sys.executable, "-m", "recipes", "run", config.stem, "--few-steps", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not writes or any(tmp_path.iterdir())
