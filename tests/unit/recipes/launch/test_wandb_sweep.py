"""The sweep's file, without a server: each command that an agent would start is understood."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from lightning_dist.engine.splitting.config import ScheduleName
from recipes.command_line import run

SCHEDULE = "trainer.strategy.init_args.schedule"
ROOT = Path(__file__).parents[4]
SWEEP = yaml.safe_load((ROOT / "recipes/launch/wandb_sweep.yaml").read_text())


def commands() -> list[list[str]]:
    """Returns the words behind the interpreter, for the ends and choices of each parameter."""
    ends = [
        parameter.get("values") or [parameter["min"], parameter["max"]]
        for parameter in SWEEP["parameters"].values()
    ]
    found = []
    for values in product(*ends):
        chosen = {n: {"value": v} for n, v in zip(SWEEP["parameters"], values, strict=True)}
        words = create_sweep_command([*SWEEP["command"]])
        assert words[:2] == ["${env}", "${interpreter}"]
        assert words[-1] == "${args}"
        found.append([*words[2:-1], *create_sweep_command_args({"args": chosen})["args"]])
    return found


def test_each_command_is_understood(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert set(SWEEP["parameters"][SCHEDULE]["values"]) <= set(get_args(get_args(ScheduleName)[0]))
    for words in commands()[::15]:  # of 16 the two that have both ends of each range
        assert words[:2] == ["-m", "recipes.train"]
        monkeypatch.setattr("sys.argv", [*words[1:], "--print_config"])
        with pytest.raises(SystemExit) as stopped:
            run()
        assert stopped.value.code == 0
        config: Any = yaml.safe_load(capsys.readouterr().out)
        assert config["trainer"]["logger"]["init_args"]["offline"] is False
        assert config["model"]["init_args"]["learning_rate"] in (0.001, 0.02)
        assert config["trainer"]["strategy"]["init_args"]["schedule"] in ("gpipe", "pipedream_2bw")


def test_the_metric_is_one_that_the_recipe_logs() -> None:
    config = yaml.safe_load((ROOT / "recipes/configs/gpt_wandb.yaml").read_text())
    monitored = [
        callback.get("init_args", {}).get("monitor") for callback in config["trainer"]["callbacks"]
    ]
    assert SWEEP["metric"]["name"] in monitored
