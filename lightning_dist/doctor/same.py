"""What must be the same everywhere: versions, variables, and the code itself."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

import torch

from lightning_dist.doctor.check import Check, Run
from lightning_dist.doctor.result import Result, fail, ok, warn
from lightning_dist.engine.common.environment import (
    Environment,
    compare_environments,
    read_environment,
)

# With these different, ranks would compute something else, or not understand each other.
_VITAL = frozenset({"torch", "lightning", "lightning-dist", "CUDA", "NCCL", "code", "script"})
_TOOL_SECONDS = 5.0


def probe_environment(run: Run) -> Environment:
    """Reads this process's environment, and looks at the code and the driver."""
    own = read_environment()
    script = run.options.script
    values = {
        "script": "none" if script is None else _digest([script]),
        "code": _digest(sorted(Path(__file__).parents[1].rglob("*.py"))),
        "git commit": output_of("git", "rev-parse", "HEAD") or "none",
    }
    if torch.cuda.is_available():
        query = ("--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        values["CUDA"] = str(torch.version.cuda)
        values["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        values["driver"] = output_of("nvidia-smi", *query) or "unknown"
    return Environment(own.host, {**own.values, **values})


def judge_environments(run: Run, facts: Mapping[int, Environment]) -> Result:
    """Judges whether all ranks have the same environment."""
    table = compare_environments([facts[rank] for rank in sorted(facts)])
    names = [name for name, *_ in table.rows if name]
    if not names:
        values = facts[min(facts)].values
        shown = ", ".join(f"{name} {values[name]}" for name in ("Python", "torch", "lightning"))
        return ok(f"the same everywhere: {shown}")
    judge = fail if _VITAL.intersection(names) else warn
    return judge(
        f"hosts differ in {', '.join(names)}",
        "Install the same packages on all hosts, from one file of exact versions or one container"
        " image, copy the same code there, and let the launcher pass the variables on.",
        table,
    )


def _digest(paths: list[Path]) -> str:
    digest = blake2b(digest_size=8)
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def output_of(*command: str) -> str:
    """Returns what a command prints; empty if there is no such command."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
    )
    return done.stdout.strip()


ENVIRONMENT = Check(
    "environment", probe_environment, judge_environments, "Look at the disk with the code.", 30.0
)
