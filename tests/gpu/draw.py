"""Goes on drawing cases on a GPU, or runs one again: ``python -m tests.gpu.draw``.

The piece ``drawn`` does the first for two minutes. What it finds is run again with ``--case``.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from tests.differential.case import Case
from tests.differential.check import RefusedError, find_differences
from tests.differential.dials.strategies import STRATEGIES
from tests.differential.fuzz import Fuzzer
from tests.differential.machine import Machine
from tests.gpu.pieces.drawn import Pool
from tests.gpu.ranks import exact_products, open_ranks
from tests.gpu.setting import DEVICES, Setting


def main() -> None:
    """Runs cases and exits with 1 if any failed."""
    options = _parser().parse_args()
    machine = Machine(options.device, is_apart=True)
    exact_products()
    with open_ranks(Setting(options.device)) as ranks:
        pool = Pool(ranks)
        if options.case is not None:
            case = eval(options.case, {"Case": Case})  # as the tester printed it
            raise SystemExit(any(_differs(case, pool, machine) for _ in range(options.times)))
        fuzzer = Fuzzer(pool, machine, options.shrink_seconds, partial(print, flush=True))
        fuzzer.run(
            first_seed=int(time.time()) if options.seed is None else options.seed,
            seconds=options.seconds,
            runs=10**6,
            strategies=tuple(options.strategies) or None,
        )
    for failure in fuzzer.failures.values():
        print(repr(failure.case), *(line.strip()[-600:] for line in failure.lines[:5]), sep="\n  ")
    print(fuzzer)
    raise SystemExit(bool(fuzzer.failures))


def _differs(case: Case, pool: Pool, machine: Machine) -> bool:
    try:
        found = find_differences(case, pool, machine)
    except RefusedError as error:
        print(f"refused: {error}", flush=True)
        return False
    print("\n".join(line.strip()[-600:] for line in found) or "as on one device", flush=True)
    return bool(found)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.gpu.draw", description=__doc__)
    made.add_argument("--device", choices=DEVICES, default="cuda")
    made.add_argument("--seconds", type=float, default=120.0, help="for how long")
    made.add_argument("--seed", type=int, help="of the first round of cases")
    made.add_argument("--shrink-seconds", type=float, default=15.0)
    made.add_argument("--strategies", nargs="*", choices=sorted(STRATEGIES), default=[])
    made.add_argument("--case", help="one case, as it was printed, in place of drawn ones")
    made.add_argument("--times", type=int, default=5, help="how often the one case is run at most")
    return made


if __name__ == "__main__":
    main()
