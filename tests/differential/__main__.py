"""``make fuzz``: go on drawing cases, then print the smallest failing one as a script."""

from __future__ import annotations

import argparse
import time
from functools import partial

from tests.differential.check import Pool
from tests.differential.dials.strategies import STRATEGIES
from tests.differential.fuzz import Failure, Fuzzer
from tests.differential.machine import ON_CPU, Machine
from tests.differential.script import script_of
from tests.helpers.processes.workers import WorkerPool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what :func:`draw_cases` reads."""
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long")
    parser.add_argument("--runs", type=int, default=1_000_000, help="at most how many cases")
    parser.add_argument("--seed", type=int, default=None, help="of the first round of cases")
    parser.add_argument("--shrink-seconds", type=float, default=60.0)
    parser.add_argument(
        "--strategies", nargs="*", choices=sorted(STRATEGIES), help="only these; slow ones too"
    )


def draw_cases(pool: Pool, machine: Machine, arguments: argparse.Namespace) -> list[Failure]:
    """Draws and runs cases, prints what it finds, and gives the failures, smallest first.

    Args:
        pool: Processes for the ranks.
        machine: What they and the one device run on.
        arguments: Those of :func:`add_arguments`.
    """
    report = partial(print, flush=True)
    fuzzer = Fuzzer(pool, machine, arguments.shrink_seconds, report)
    fuzzer.run(
        first_seed=int(time.time()) if arguments.seed is None else arguments.seed,
        seconds=arguments.seconds,
        runs=arguments.runs,
        strategies=tuple(arguments.strategies) if arguments.strategies else None,
    )
    for message, count in fuzzer.refusals.most_common():
        print(f"refused {count} times: {message}")
    failures = sorted(fuzzer.failures.values(), key=lambda failure: failure.size)
    for failure in failures:
        print(f"\n{failure.case!r}")
        print("\n".join(f"  {line.strip()[-600:]}" for line in failure.lines[:5]))
    print(f"{fuzzer}" if failures else f"{fuzzer}: all as on one device")
    return failures


def main() -> None:
    """Runs cases and exits with 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    add_arguments(parser)
    pool = WorkerPool()
    try:
        failures = draw_cases(pool, ON_CPU, parser.parse_args())
    finally:
        pool.close()
    if failures:
        print(f"The smallest failing case as a script:\n\n{script_of(failures[0].case)}")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
