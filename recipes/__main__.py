"""List the recipes, run one, or run them all and compare their results with the documented ones.

.. code-block:: bash

    python -m recipes list
    python -m recipes run gpt_pipedream                  # further options go to the recipe
    python -m recipes run gpt_pipedream --few-steps      # seconds, to try it
    python -m recipes check gpt_pipedream gpt_1f1b       # all of them, where none is named
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from recipes.catalog import Recipe, find_recipes


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: Words of the command line; None takes those of the process.

    Returns:
        The exit status: 0 if all went well.
    """
    options, others = _parser().parse_known_args(arguments)
    if others and options.action != "run":
        _parser().error(f"unknown options: {' '.join(others)}")
    try:
        if options.action == "list":
            print_list(find_recipes())
            return 0
        if options.action == "run":
            ((config, recipe),) = find_recipes([options.name]).items()
            return _run(config, recipe, options.few_steps, others)
        return check(find_recipes(options.names))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def print_list(recipes: dict[Path, Recipe]) -> None:
    """Prints a row for each recipe: its name, what it shows, its time, and the result to expect.

    Args:
        recipes: Files and what they say of themselves.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("recipe", "what it shows", "on two cores", "result to expect")
    for config, recipe in recipes.items():
        notes = [str(recipe.result)] if recipe.result else []
        notes += [f"needs: {install}"] if (install := recipe.missing()) else []
        cells = (config.stem, recipe.shows, _spoken(recipe.seconds), "\n".join(notes))
        table.add_row(*map(escape, cells))
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)
    print("python -m recipes run NAME runs one. With --few-steps it takes seconds.")


def check(recipes: dict[Path, Recipe]) -> int:
    """Runs recipes whole, one after the other, and compares their results with the documented ones.

    Args:
        recipes: Files and what they say of themselves.

    Returns:
        The number of recipes that failed, or whose results are out of their bands.
    """
    failures = 0
    for config, recipe in recipes.items():
        start = time.perf_counter()
        verdict, failed = _verdict(config, recipe)
        failures += failed
        seconds = f"{time.perf_counter() - start:.0f} s"
        print(f"{config.stem}: {'FAILED, ' if failed else ''}{verdict} ({seconds})", flush=True)
    print(f"{failures} of {len(recipes)} recipes failed.")
    return failures


def _verdict(config: Path, recipe: Recipe) -> tuple[str, bool]:
    """Runs a recipe; returns what became of it, and whether it failed."""
    if install := recipe.missing():
        return f"skipped: {install}", False
    done = subprocess.run(
        recipe.words(config), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        return f"status {done.returncode}:\n{done.stdout[-4000:]}", True
    if recipe.result is None:
        return "ran", False
    try:
        value = recipe.result.read(done.stdout)
    except ValueError as error:
        return f"{error}\n{done.stdout[-4000:]}", True
    low, high = recipe.result.between
    return f"{value:g}, expected {recipe.result}", not low <= value <= high


def _run(config: Path, recipe: Recipe, is_short: bool, options: Sequence[str]) -> int:
    if install := recipe.missing():
        raise ValueError(f"The recipe {config.stem} needs more packages: {install}")
    few_steps = recipe.few_steps if is_short else ()
    return subprocess.run(recipe.words(config, [*few_steps, *options])).returncode


def _spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("list", help="list all recipes")
    run = actions.add_parser("run", help="run a recipe; further options go to it")
    run.add_argument("name")
    run.add_argument("--few-steps", action="store_true", help="a few steps, to try it")
    check = actions.add_parser("check", help="run recipes whole, and compare their results")
    check.add_argument("names", nargs="*", metavar="name", help="recipes; none means all")
    return parser


if __name__ == "__main__":
    sys.exit(main())
