"""What each recipe says of itself: the key ``recipe`` of its file in ``recipes/configs``.

A new recipe is a new file there. One that is no configuration of :mod:`recipes.train` has the key
alone, with a command of its own.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parent / "configs"
_FEW_STEPS = (
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=3",
    "--trainer.limit_val_batches=2",
    "--trainer.limit_test_batches=2",
    "--trainer.log_every_n_steps=1",
)
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


@dataclass(frozen=True)
class Result:
    """A number that a run prints, and the band in which it is to be.

    Attributes:
        row: The text that the run prints ahead of the number, in the same line.
        between: Smallest and largest value to expect; printed with three places behind the point.
        unit: Unit of the number, or what it counts.

    Raises:
        ValueError: The band is empty.
    """

    row: str
    between: tuple[float, float]
    unit: str = ""

    def __post_init__(self) -> None:
        """Checks the band."""
        low, high = self.between
        if not low <= high:
            raise ValueError(f"between={list(self.between)} must have the smaller value first.")

    def __str__(self) -> str:
        """Returns the row and its band."""
        low, high = (f"{value:,.6g}" for value in self.between)
        return f"{self.row} {low} to {high} {self.unit}".rstrip()

    def read(self, output: str) -> float:
        """Returns the number of the last line that has the row.

        Args:
            output: What a run has printed.

        Raises:
            ValueError: No line has the row and a number behind it.
        """
        found = re.findall(rf"\b{re.escape(self.row)}\b[^\w\n-]*({_NUMBER})", output)
        if not found:
            raise ValueError(f"The run has printed no line with {self.row!r} and a number.")
        return float(found[-1].replace(",", ""))


@dataclass(frozen=True)
class Recipe:
    """The key ``recipe`` of a configuration.

    Attributes:
        shows: What the recipe shows, in a line.
        seconds: How long it takes on two cores.
        result: The number to expect, if there is one.
        command: What runs it; ``{config}`` is the path of the file.
        few_steps: Options that make a run of a few steps of it.
        needs: What has to be installed: modules, and the command that installs each.
    """

    shows: str
    seconds: float
    result: Result | None = None
    command: str = "python -m recipes.train fit --config {config}"
    few_steps: tuple[str, ...] = _FEW_STEPS
    needs: dict[str, str] = field(default_factory=dict)

    def words(self, config: Path, options: Iterable[str] = ()) -> list[str]:
        """Returns the words of the command, with this interpreter.

        Args:
            config: The file of the recipe.
            options: Further words.
        """
        first, *others = shlex.split(self.command.format(config=shlex.quote(str(config))))
        interpreter = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}
        if first not in interpreter:
            raise ValueError(f"command={self.command!r} must begin with python or torchrun.")
        return [sys.executable, *interpreter[first], *others, *options]

    def missing(self) -> str | None:
        """Returns the commands that install what is missing, or None if nothing is."""
        absent = [install for name, install in self.needs.items() if find_spec(name) is None]
        return " && ".join(dict.fromkeys(absent)) or None


def read_recipe(config: Path) -> Recipe:
    """Reads what a recipe says of itself.

    Args:
        config: The file of the recipe.

    Raises:
        ValueError: The file has no such key, or one with unknown or missing entries.
    """
    import yaml

    loaded: Any = yaml.safe_load(config.read_text())
    entries = loaded.get("recipe") if isinstance(loaded, dict) else None
    if not isinstance(entries, dict):
        raise ValueError(f"{config} has no key `recipe` that says what it shows.")
    try:
        if "result" in entries:
            result = entries["result"]
            entries["result"] = Result(**{**result, "between": tuple(result["between"])})
        if "few_steps" in entries:
            entries["few_steps"] = tuple(entries["few_steps"])
        return Recipe(**entries)
    except (TypeError, KeyError) as error:
        raise ValueError(f"The key `recipe` of {config} is wrong: {error}.") from error


def find_recipes(names: Iterable[str] = (), configs: Path = CONFIGS) -> dict[Path, Recipe]:
    """Finds recipes by their names.

    Args:
        names: Names of files without their ending; none takes all recipes.
        configs: The folder of the files.

    Returns:
        The files and what they say of themselves, in the order of the names.

    Raises:
        ValueError: There is no such recipe.
    """
    files = {path.stem: path for path in sorted(configs.glob("*.yaml"))}
    names = list(names)
    for name in names:
        if name not in files:
            raise ValueError(f"There is no recipe {name!r}. There are: {', '.join(files)}.")
    return {files[name]: read_recipe(files[name]) for name in names or files}
