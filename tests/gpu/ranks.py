"""One or two ranks on the one device.

Each rank is a host of its own with a single device: ``Trainer(num_nodes=2, devices=1)``. So
Lightning asks for no second GPU. NCCL refuses two ranks of a host on a GPU, and takes them for two
hosts where each says another ``NCCL_HOSTID``. They then talk through the loopback interface.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.benchmarks.quiet import quieten
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

CASE_SECONDS = 90.0


class Ranks:
    """Runs cases, functions of modules, on ranks in processes that live longer than a case."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._pool = WorkerPool()

    def run(
        self,
        count: int,
        case: Callable[..., Any],
        *arguments: Any,
        environment: dict[str, str] | None = None,
        timeout: float = CASE_SECONDS,
    ) -> list[Any]:
        """Runs a case on each rank, and returns what each returned.

        Args:
            count: Number of ranks.
            case: Called with the setting and the arguments.
            arguments: What can be pickled.
            environment: More variables; ``"RANK"`` in a value stands for the rank.
            timeout: Seconds after which the case has failed.
        """
        given = (self.setting, environment or {}, case, arguments)
        return self._pool.run(count, _on_own_host, *given, timeout=timeout)

    def close(self) -> None:
        self._pool.close()


@contextmanager
def open_ranks(setting: Setting) -> Iterator[Ranks]:
    """Returns a context manager with processes for ranks, which end with it."""
    ranks = Ranks(setting)
    try:
        yield ranks
    finally:
        ranks.close()


def _on_own_host(
    setting: Setting, environment: dict[str, str], case: Callable[..., Any], arguments: Any
) -> Any:
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", NODE_RANK=rank)
    os.environ.update({name: value.replace("RANK", rank) for name, value in environment.items()})
    quieten()
    exact_products()
    return case(setting, *arguments)


def exact_products() -> None:
    """Lets convolutions in float32 compute in float32: TF32 has three digits."""
    torch.backends.cudnn.allow_tf32 = False


NCCL_ON_ONE_GPU = {
    "NCCL_HOSTID": "rank-RANK",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",  # no plugin for another network, which has no loopback
}


def trainer_of(setting: Setting, strategy: Any, num_ranks: int = 1, **options: Any) -> Any:
    """Builds a quiet trainer of ranks that share the setting's device."""
    place = {"accelerator": setting.accelerator, "devices": 1, "num_nodes": num_ranks}
    return make_trainer(strategy=strategy, **{**place, **options})


def attempt(what: str, measure: Callable[[], Row]) -> Row:
    """Returns a measurement's row, or one that tells how it has failed; the rest goes on."""
    try:
        return measure()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return Row(what, f"{type(error).__name__}: {lines[0]} ... {lines[-1]}", "", Verdict.FAILS)


def within(what: str, difference: float, tolerance: float, found: str = "") -> Row:
    """Returns the row of a largest difference; it fails if it is not below the tolerance."""
    verdict = Verdict.HOLDS if difference < tolerance else Verdict.FAILS  # not, if it is nan
    return Row(what, found or f"{difference:.1e}", f"< {tolerance:g}", verdict)


def beside_goal(what: str, found: str, setting: Setting, ratio: float, goal: float) -> Row:
    """Returns the row of a ratio that shall reach a goal; small sizes on a CPU have no goal."""
    if not setting.is_gpu:
        return Row(what, found, f">= {goal} on a GPU")
    return Row(what, found, f">= {goal}", Verdict.HOLDS if ratio >= goal else Verdict.MISSES)
