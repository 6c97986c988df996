"""The command line in this process; tests/integration starts it as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import yaml

from lightning_dist import FSDPStrategy
from recipes.command_line import run

CONFIGS = Path(__file__).parents[3] / "recipes" / "configs"


def print_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, dict[str, object]]:
    monkeypatch.setattr("sys.argv", ["recipes.train", "fit", *words, "--print_config"])
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 0
    printed: dict[str, dict[str, object]] = yaml.safe_load(capsys.readouterr().out)
    return printed


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Lightning's own of the parser
def test_a_strategy_may_be_a_bare_class(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[L.Trainer] = []
    monkeypatch.setattr(L.Trainer, "fit", lambda trainer, *_, **__: trained.append(trainer))
    words = ["--config", str(CONFIGS / "gpt_1f1b.yaml"), "--trainer.devices=1"]
    words += ["--trainer.strategy=lightning_dist.FSDPStrategy"]  # without the stages' arguments
    monkeypatch.setattr("sys.argv", ["recipes.train", "fit", *words])
    run()
    assert type(trained[0].strategy) is FSDPStrategy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.limit_val_batches=0"],
        ["--trainer.enable_checkpointing=false", "--trainer.callbacks=null"],
    ],
    ids=["no validation", "no checkpoint"],
)
def test_the_last_weights_are_tested_where_no_checkpoint_was_saved(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ["--config", str(CONFIGS / "unet_trace.yaml"), "--model.width=4", "--model.depth=1"]
    alone = ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.max_epochs=1"]
    few = ["--data.num_train=16", "--data.batch_size=16"]
    monkeypatch.setattr("sys.argv", ["recipes.train", "fit", *config, *alone, *few, *words])
    with caplog.at_level("INFO"):
        run()
    assert "the last weights are tested" in caplog.text


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("gpt_single", None),
        ("gpt_gpipe", "gpipe"),
        ("gpt_1f1b", "1f1b"),
        ("gpt_pipedream", "pipedream"),
    ],
)
def test_each_config_parses(
    name: str,
    schedule: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = print_config(monkeypatch, capsys, "--config", str(CONFIGS / f"{name}.yaml"))
    strategy = config["trainer"]["strategy"]
    if schedule is None:
        assert strategy == "auto"
    else:
        assert isinstance(strategy, dict)
        assert strategy["class_path"] == "lightning_dist.PipelineStrategy"
        assert strategy["init_args"]["schedule"] == schedule
    logger = config["trainer"]["logger"]
    assert isinstance(logger, dict)
    assert logger["init_args"]["name"] == name
    assert config["model"]["class_path"] == "recipes.gpt.GPT"
    assert config["data"]["class_path"] == "recipes.text.TextDataModule"


def test_the_powersgd_config_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = CONFIGS / "gpt_ddp_powersgd.yaml"
    config: Any = print_config(monkeypatch, capsys, "--config", str(path))
    strategy = config["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_dist.DDPStrategy"
    assert strategy["init_args"]["compression"] == "powersgd"
    num_steps = config["trainer"]["max_epochs"] * 6400 // 32
    assert strategy["init_args"]["powersgd_start_step"] < num_steps / 4
    assert config["model"]["class_path"] == "recipes.gpt.GPT"


def test_the_fsdp_config_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config: Any = print_config(monkeypatch, capsys, "--config", str(CONFIGS / "gpt_fsdp.yaml"))
    strategy = config["trainer"]["strategy"]
    assert strategy["class_path"] == "lightning_dist.FSDPStrategy"
    assert strategy["init_args"]["wrap"]["class_path"] == "lightning_dist.wrap.ByClass"
    assert strategy["init_args"]["wrap"]["init_args"] == {"names": ["Block"]}


def test_the_digits_config_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", str(CONFIGS / "digits_ddp.yaml"), "--model.width=8", "--data.batch_size=5")
    config: Any = print_config(monkeypatch, capsys, *words)
    assert config["trainer"]["strategy"]["class_path"] == "lightning_dist.DDPStrategy"
    assert config["test_after_fit"] is True
    assert config["model"]["class_path"] == "recipes.resnet.ResNet"
    assert config["model"]["init_args"]["width"] == 8
    assert config["data"]["class_path"] == "recipes.digits.DigitsDataModule"
    assert config["data"]["init_args"]["batch_size"] == 5


@pytest.mark.parametrize("name", ["bert_tp", "bert_fsdp", "bert_mesh_2x2"])
def test_the_bert_configs_parse(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", str(CONFIGS / f"{name}.yaml"), "--model.dropout=0.2")
    config: Any = print_config(monkeypatch, capsys, *words)
    assert config["trainer"]["logger"]["init_args"]["name"] == name
    assert config["test_after_fit"] is True
    assert config["model"]["class_path"] == "recipes.finetune_bert.BertClassifier"
    arguments = config["model"]["init_args"]
    assert arguments["dropout"] == 0.2
    assert (arguments["warmup_steps"], arguments["weight_decay"]) == (10, 0.01)  # not the GPT's
    assert config["data"]["class_path"] == "recipes.docstring_data.DocstringDataModule"
    num_replicas = 1 if name == "bert_tp" else 2
    assert config["data"]["init_args"]["batch_size"] * num_replicas == 32


def test_without_a_config_it_logs_to_csv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = print_config(monkeypatch, capsys)["trainer"]["logger"]
    assert isinstance(logger, dict)
    assert logger["class_path"] == "lightning.pytorch.loggers.CSVLogger"
    assert logger["init_args"]["save_dir"] == "runs"


def test_the_mesh_config_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", str(CONFIGS / "gpt_mesh_2x2.yaml"))
    changed = "--trainer.strategy.init_args.tensor.sequence_parallel=true"
    config: Any = print_config(monkeypatch, capsys, *words, changed)
    arguments = config["trainer"]["strategy"]["init_args"]
    assert config["trainer"]["strategy"]["class_path"] == "lightning_dist.MeshStrategy"
    assert (arguments["dp_shard"], arguments["tp"]) == (2, 2)
    assert arguments["shard"]["activation_checkpointing"] == "selective"
    assert arguments["tensor"]["sequence_parallel"] is True
    assert arguments["tensor"]["plan"]["model.*.up"] == "colwise"


def test_the_config_with_stages_parses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--config", str(CONFIGS / "gpt_mesh_2x2x2.yaml"))
    changed = "--trainer.strategy.init_args.pipeline.partition=[3,3]"
    config: Any = print_config(monkeypatch, capsys, *words, changed)
    arguments = config["trainer"]["strategy"]["init_args"]
    assert (arguments["pp"], arguments["dp_shard"], arguments["tp"]) == (2, 2, 2)
    assert arguments["pipeline"]["num_microbatches"] == 4
    assert arguments["pipeline"]["partition"] == [3, 3]


# How many ranks read other data than the others.
DATA_RANKS = {"gpt_ddp_powersgd": 2, "gpt_fsdp": 2, "gpt_mesh_2x2": 2, "gpt_mesh_2x2x2": 2}


def test_the_configs_train_the_same_model_on_the_same_data() -> None:
    loaded = {path.stem: yaml.safe_load(path.read_text()) for path in CONFIGS.glob("gpt_*.yaml")}
    assert len(loaded) == 13
    for name, config in loaded.items():
        config["data"]["batch_size"] *= DATA_RANKS.get(name, 1)
    for config in loaded.values():
        for key in ("model", "data", "seed_everything"):
            assert config[key] == loaded["gpt_single"][key]
