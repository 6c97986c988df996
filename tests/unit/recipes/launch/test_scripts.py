"""The launch scripts, with a stand-in for each launcher that prints the words it is given."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from torch.distributed.run import parse_args

from tests.unit.recipes.test_cli import print_config

ROOT = Path(__file__).parents[4]
LAUNCH = ROOT / "recipes" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
CONFIGS = ["--config", "recipes/configs/gpt_1f1b.yaml", "--config", "recipes/launch/tiny.yaml"]

SBATCH_OPTIONS = {
    "job-name": r"\w+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d\d:\d\d:\d\d",
    "signal": r"(R?B?:)?[A-Z0-9]+(@\d+)?",
    "requeue": "",
    "output": r"\S+",
    "open-mode": r"append|truncate",
}


@pytest.fixture
def launchers(tmp_path: Path) -> Path:
    """A folder of stand-ins."""
    for name in ("torchrun", "mpirun", "srun"):
        stand_in = tmp_path / name
        stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\n')
        stand_in.chmod(0o755)
    return tmp_path


def started(
    script: str, *words: str, launchers: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = f"{launchers}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", LAUNCH / script, *words],
        env={"PATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def words_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[1:]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_each_script(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()


@pytest.mark.parametrize(
    ("variables", "endpoint", "hosts", "processes"),
    [
        ({}, "", 1, 2),
        ({"NPROC_PER_NODE": "8"}, "", 1, 8),
        ({"NNODES": "2", "NPROC_PER_NODE": "1", "RDZV_ENDPOINT": "a:7"}, "a:7", 2, 1),
    ],
    ids=str,
)
def test_torchrun_takes_these_words(
    launchers: Path, variables: dict[str, str], endpoint: str, hosts: int, processes: int
) -> None:
    words = words_of(started("torchrun.sh", *CONFIGS, launchers=launchers, **variables))
    options = parse_args(words)
    assert (options.nnodes, options.nproc_per_node) == (str(hosts), str(processes))
    assert options.rdzv_endpoint == endpoint
    assert options.standalone == (not endpoint)
    assert (options.module, options.training_script) == (True, "recipes.train")
    fit = [f"--trainer.num_nodes={hosts}", f"--trainer.devices={processes}"]
    assert options.training_script_args == ["fit", *CONFIGS, *fit]


def test_several_hosts_need_a_place_to_meet(launchers: Path) -> None:
    done = started("torchrun.sh", *CONFIGS, launchers=launchers, NNODES="2")
    assert done.returncode == 2
    assert "RDZV_ENDPOINT=node-0:29400" in done.stderr
    assert not done.stdout


def test_mpirun_gets_what_stands_behind_the_dashes(launchers: Path) -> None:
    words = words_of(
        started(
            *("mpirun.sh", *CONFIGS, "--", "--hostfile", "a file"),
            launchers=launchers,
            NNODES="2",
            NPROC_PER_NODE="4",
        )
    )
    python = words.index("python")
    assert words[:2] == ["-n", "8"]
    assert words[2:4] == ["--map-by", "ppr:4:node"]
    assert words[python - 2 : python] == ["--hostfile", "a file"]
    fit = ["fit", *CONFIGS, "--trainer.num_nodes=2", "--trainer.devices=4"]
    assert words[python + 1 :] == ["-m", "recipes.train", *fit]


def sbatch_options() -> dict[str, str]:
    text = (LAUNCH / "slurm.sbatch").read_text()
    head, script = text.split("set -euo pipefail")
    assert "#SBATCH" not in script  # sbatch stops reading at the first command
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", head, flags=re.MULTILINE)
    assert len(found) == head.count("\n#SBATCH")
    return dict(found)


def test_sbatch_options_are_known_and_requeue() -> None:
    options = sbatch_options()
    for name, value in options.items():
        assert re.fullmatch(SBATCH_OPTIONS[name], value), name
    assert options["signal"] == "USR1@300"  # `B:` would signal the script, not the tasks
    assert options["open-mode"] == "append"
    assert {"requeue", "nodes", "ntasks-per-node"} <= options.keys()


def test_srun_ends_the_step_with_its_first_failure(launchers: Path) -> None:
    slurm = {"JOB_ID": "7", "NNODES": "3", "NTASKS_PER_NODE": "2", "CPUS_PER_TASK": "5"}
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    words = words_of(started("slurm.sbatch", *CONFIGS, launchers=launchers, **variables))
    assert words[:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=5"]
    assert words[2:6] == ["python", "-m", "recipes.train", "fit"]
    assert words[6 : 6 + len(CONFIGS)] == CONFIGS
    assert words[6 + len(CONFIGS) :] == [
        *("--trainer.num_nodes=3", "--trainer.devices=2"),
        "--trainer.default_root_dir=runs/slurm-7",
        "--trainer.logger.init_args.save_dir=runs/slurm-7",
    ]


def test_a_recipe_takes_these_words(
    launchers: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = words_of(started("torchrun.sh", *CONFIGS, launchers=launchers, NPROC_PER_NODE="4"))
    config = print_config(monkeypatch, capsys, *words[words.index("fit") + 1 :])
    assert config["trainer"]["devices"] == "4"  # Lightning reads a number in it
    assert config["trainer"]["num_nodes"] == 1
    assert config["trainer"]["max_epochs"] == 1  # of tiny.yaml
    assert config["model"]["init_args"]["width"] == 16  # type: ignore[index]
    assert config["model"]["init_args"]["depth"] == 4  # type: ignore[index]
