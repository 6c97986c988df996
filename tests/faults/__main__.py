"""``make faults``: run trainings in which something goes wrong, and see that each ends well."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console

from tests.faults.campaign import Campaign, line_of, table_of


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="how many, from the first on")
    parser.add_argument("--seed", type=int, default=0, help="chooses what goes wrong")
    parser.add_argument("--run", type=int, help="repeat this one, and keep its folder")
    parser.add_argument("--hosts", action="store_true", help="on two hosts; needs root, iproute2")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin none after that")
    parser.add_argument("--folder", type=Path, default=Path("runs/faults"))
    return parser.parse_args()


def main() -> None:
    """Runs a campaign, or goes on with it; exits with 1 if something was not as it must be."""
    arguments = _arguments()
    campaign = Campaign(
        arguments.folder.absolute(),
        arguments.seed,
        lambda line: print(line, flush=True),
        on_hosts=arguments.hosts,
    )
    if arguments.run is not None:
        result = campaign.repeat(arguments.run)
        print(line_of(arguments.run, result))
        sys.exit(bool(result.problems))
    campaign.run(list(range(arguments.runs)), arguments.jobs, arguments.seconds)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table_of(campaign.results))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    console.print(f"load {load} on {os.cpu_count()} cores, in the last 1, 5 and 15 minutes")
    sys.exit(any(result.problems for result in campaign.results.values()))


if __name__ == "__main__":
    main()
