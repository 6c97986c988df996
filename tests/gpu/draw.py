"""Goes on drawing cases on a GPU, or runs one again: ``python -m tests.gpu.draw``.

The piece ``drawn`` does the first for two minutes. What it finds is run again with ``--case``.
"""

from __future__ import annotations

import argparse

from tests.differential.__main__ import add_arguments, draw_cases
from tests.differential.case import Case
from tests.differential.check import RefusedError, find_differences
from tests.differential.machine import Machine
from tests.gpu.pieces.drawn import Pool
from tests.gpu.ranks import exact_products, open_ranks
from tests.gpu.setting import DEVICES, Setting


def main() -> None:
    """Runs cases and exits with 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.draw", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--case", help="one case, as it was printed, in place of drawn ones")
    parser.add_argument("--times", type=int, default=5, help="how often that is run at most")
    arguments = parser.parse_args()
    machine = Machine(arguments.device, is_apart=True)
    exact_products()
    with open_ranks(Setting(arguments.device)) as ranks:
        pool = Pool(ranks)
        if arguments.case is None:
            raise SystemExit(bool(draw_cases(pool, machine, arguments)))
        case = eval(arguments.case, {"Case": Case})  # as the tester printed it
        raise SystemExit(any(_differs(case, pool, machine) for _ in range(arguments.times)))


def _differs(case: Case, pool: Pool, machine: Machine) -> bool:
    try:
        found = find_differences(case, pool, machine)
    except RefusedError as error:
        print(f"refused: {error}", flush=True)
        return False
    print("\n".join(line.strip()[-600:] for line in found) or "as on one device", flush=True)
    return bool(found)


if __name__ == "__main__":
    main()
