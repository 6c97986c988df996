"""The command line in this process; tests/integration starts it as a user would."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from recipes.train import main

CONFIGS = Path(__file__).parents[3] / "recipes" / "configs"


def print_config(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> dict[str, dict[str, object]]:
    monkeypatch.setattr("sys.argv", ["recipes.train", "fit", *words, "--print_config"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    printed: dict[str, dict[str, object]] = yaml.safe_load(capsys.readouterr().out)
    return printed


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


def test_without_a_config_it_logs_to_csv(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = print_config(monkeypatch, capsys)["trainer"]["logger"]
    assert isinstance(logger, dict)
    assert logger["class_path"] == "lightning.pytorch.loggers.CSVLogger"
    assert logger["init_args"]["save_dir"] == "runs"


def test_the_configs_train_the_same_model_on_the_same_data() -> None:
    loaded = [yaml.safe_load(path.read_text()) for path in sorted(CONFIGS.glob("*.yaml"))]
    assert len(loaded) == 4
    for config in loaded[1:]:
        for key in ("model", "data", "seed_everything"):
            assert config[key] == loaded[0][key]
