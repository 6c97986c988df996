"""Run test files of Lightning's own suite with a strategy put in where a test names none.

    python tests/lightning_suite.py CHECKOUT STRATEGY FILE...

``CHECKOUT`` is a checkout of Lightning at the tag of the installed version, ``STRATEGY`` a key of
``STRATEGIES``, each ``FILE`` a path below ``tests/tests_pytorch``. Options of pytest's may follow.
What the counts mean, and which tests cannot pass, is in ``docs/lightning_tests.md``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import lightning.fabric.utilities.imports as fabric_imports
import lightning.pytorch as pl
import lightning.pytorch.utilities.imports as pytorch_imports
from lightning.pytorch.strategies import DDPStrategy, Strategy

import lightning_dist as ld

STRATEGIES: dict[str, Callable[[], Strategy] | None] = {
    "one_device": None,
    "lightning_ddp": DDPStrategy,
    "ddp": ld.DDPStrategy,
    "fsdp": ld.FSDPStrategy,
    "tensor_parallel": ld.TensorParallelStrategy,
    "mesh": ld.MeshStrategy,
    "pipeline": partial(ld.PipelineStrategy, layers="trace"),
}
_NEWER = ("_TORCH_GREATER_EQUAL_2_9", "_TORCH_GREATER_EQUAL_2_10", "_TORCH_GREATER_EQUAL_2_11")
_VARIABLE = "LIGHTNING_SUITE_STRATEGY"
_OTHER_PROCESSES = "not spawn and not ddp and not fork and not launch and not tpu and not xla"


def pytest_configure() -> None:
    """Makes each Trainer that names no strategy take the one that was asked for."""
    for versions in (fabric_imports, pytorch_imports):
        for name in _NEWER:  # of a checkout that is newer than what is installed
            vars(versions).setdefault(name, True)
    make = STRATEGIES[os.environ[_VARIABLE]]
    if make is None:
        return
    own = pl.Trainer.__init__

    @wraps(own)
    def init(trainer: pl.Trainer, *args: Any, **given: Any) -> None:
        if not args and _leaves_open(given):
            given |= {"strategy": make(), "accelerator": "cpu", "devices": 1}
        own(trainer, *args, **given)

    pl.Trainer.__init__ = init  # type: ignore[method-assign]


def _leaves_open(given: dict[str, Any]) -> bool:
    return (
        given.get("strategy", "auto") == "auto"
        and given.get("devices", "auto") in (1, "1", "auto")
        and given.get("accelerator", "auto") in ("auto", "cpu")
        and not given.get("barebones")
    )


def main() -> int:
    """Runs pytest in the checkout."""
    checkout, strategy, *files = sys.argv[1:]
    if strategy not in STRATEGIES:
        raise SystemExit(f"{strategy!r} is none of {', '.join(STRATEGIES)}.")
    here = Path(__file__).resolve().parent
    found = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [str(here.parent), str(here), found]))
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    command += ["-q", "-rf", "--tb=line", "-W", "ignore", "--timeout", "60", "-k", _OTHER_PROCESSES]
    return subprocess.run(
        [*command, *files],
        cwd=Path(checkout) / "tests" / "tests_pytorch",
        env=os.environ | {_VARIABLE: strategy, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
