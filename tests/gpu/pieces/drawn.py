"""Runs drawn at random, under strategies on the device beside one device alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.differential.fuzz import Fuzzer
from tests.differential.machine import Machine
from tests.gpu.ranks import NCCL_ON_ONE_GPU, Ranks, exact_products, open_ranks
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting

SECONDS, ON_CPU_RUNS, SHRINK_SECONDS = 120.0, 4, 15.0
MOST_REFUSALS, MOST_LINES = 4, 5


class Pool:
    """Gives the device to ranks that know nothing of the setting."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def run(
        self, world_size: int, case: Callable[..., Any], *args: Any, timeout: float
    ) -> list[Any]:
        environment = NCCL_ON_ONE_GPU if self._ranks.setting.is_gpu else {}
        given = (world_size, _run, case, *args)
        return self._ranks.run(*given, environment=environment, timeout=2 * timeout)


def _run(_: Setting, case: Callable[..., Any], *args: Any) -> Any:
    return case(*args)


def drawn(setting: Setting) -> Iterator[Row]:
    """Draws cases for some time; a row for each way in which one differs, and one for all.

    A case that a strategy refuses is counted, with the message; some are refused as on one device.
    """
    exact_products()
    first_seed = int(time.time())
    with open_ranks(setting) as ranks:
        fuzzer = Fuzzer(Pool(ranks), Machine(setting.device, is_apart=True), SHRINK_SECONDS)
        runs = 10**6 if setting.is_gpu else ON_CPU_RUNS
        fuzzer.run(first_seed=first_seed, seconds=SECONDS, runs=runs)
    for failure in fuzzer.failures.values():
        lines = [line.strip().splitlines()[-1][-300:] for line in failure.lines[:MOST_LINES]]
        yield Row(f"{failure.case!r}", "; ".join(lines), "as on one device", Verdict.FAILS)
    verdict = Verdict.FAILS if fuzzer.failures else Verdict.HOLDS
    yield Row(f"drawn from seed {first_seed}", str(fuzzer), "as on one device", verdict)
    for message, count in fuzzer.refusals.most_common(MOST_REFUSALS):
        yield Row(f"refused {count} times", message[:300])
