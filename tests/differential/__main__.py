"""``make fuzz``: go on drawing cases, then print the smallest failing one as a script."""

from __future__ import annotations

import argparse
import time

from tests.differential.dials.strategies import STRATEGIES
from tests.differential.fuzz import Fuzzer
from tests.differential.script import script_of
from tests.helpers.processes.workers import WorkerPool


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for how long")
    parser.add_argument("--runs", type=int, default=1_000_000, help="at most how many cases")
    parser.add_argument("--seed", type=int, default=None, help="of the first round of cases")
    parser.add_argument("--shrink-seconds", type=float, default=60.0)
    parser.add_argument(
        "--strategies", nargs="*", choices=sorted(STRATEGIES), help="only these; slow ones too"
    )
    return parser.parse_args()


def main() -> None:
    """Runs cases and exits with 1 if any failed."""
    arguments = _arguments()
    first_seed = int(time.time()) if arguments.seed is None else arguments.seed
    pool = WorkerPool()
    fuzzer = Fuzzer(
        pool,
        shrink_seconds=arguments.shrink_seconds,
        report=lambda line: print(line, flush=True),
    )
    try:
        fuzzer.run(
            first_seed=first_seed,
            seconds=arguments.seconds,
            runs=arguments.runs,
            strategies=tuple(arguments.strategies) if arguments.strategies else None,
        )
    finally:
        pool.close()
    for message, count in fuzzer.refusals.most_common():
        print(f"refused {count} times: {message}")
    if not fuzzer.failures:
        print(f"{fuzzer}: all as on one device")
        return
    failures = sorted(fuzzer.failures.values(), key=lambda failure: failure.size)
    for failure in failures:
        print(f"\n{failure.case!r}")
        print("\n".join(f"  {line.strip()[-600:]}" for line in failure.lines[:5]))
    print(f"\n{fuzzer}. The smallest failing case as a script:\n\n{script_of(failures[0].case)}")
    raise SystemExit(1)


if __name__ == "__main__":
    main()
