"""What a study searches, by which objectives, and how long: a file such as ``tune_gpt.yaml``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal, Protocol

import yaml

from recipes.catalog import Recipe

Value = int | float | str | bool
Number = int | float
TPE = "optuna.samplers.TPESampler"
TOKENS_PER_SECOND = "tokens_per_second"


class Suggests(Protocol):
    """The part of optuna's trial that draws values."""

    def suggest_categorical(self, name: str, choices: list[Value]) -> Any:
        """Draws one of the choices."""

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Draws an integer."""

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Draws a number."""


@dataclass(frozen=True)
class Parameter:
    """One dimension of a search.

    Attributes:
        option: Option of ``recipes.train`` that it sets, without dashes.
        low: Smallest value. With an integer ``high`` an integer is searched.
        high: Largest value.
        log: Whether to search on a logarithmic scale.
        step: Distance of neighbouring values.
        choices: All values, instead of a range.
        when: Names and values of other parameters, one of which each must have. Elsewhere this
            parameter is left as the configuration has it.

    Raises:
        ValueError: There is neither a range nor a choice, or both.
    """

    option: str
    low: Number | None = None
    high: Number | None = None
    log: bool = False
    step: Number | None = None
    choices: list[Value] | None = None
    when: dict[str, list[Value]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Checks the range."""
        is_range = self.low is not None and self.high is not None
        if is_range == (self.choices is not None) or (self.low is None) != (self.high is None):
            raise ValueError(
                f"The parameter of {self.option!r} needs either low and high, or choices."
            )
        if self.choices is not None and not self.choices:
            raise ValueError(f"The parameter of {self.option!r} has no choices.")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(
                f"low={self.low} of {self.option!r} must not be larger than high={self.high}."
            )
        if self.log and (self.low is None or self.low <= 0 or self.step is not None):
            raise ValueError(f"log: true of {self.option!r} needs low above 0 and no step.")

    def draw(self, name: str, trial: Suggests) -> Value:
        """Draws a value.

        Args:
            name: Name of the parameter.
            trial: optuna's trial.
        """
        if self.choices is not None:
            return trial.suggest_categorical(name, self.choices)  # type: ignore[no-any-return]
        assert self.low is not None
        assert self.high is not None
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(
                name, self.low, self.high, step=int(self.step or 1), log=self.log
            )
        return trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)


@dataclass(frozen=True)
class Tuning:
    """A search for good options of a configuration.

    Attributes:
        base: Configuration of ``recipes.train`` that each trial trains.
        space: Names of parameters, and what each searches.
        objectives: Names of logged metrics, and which way each is better. ``tokens_per_second`` is
            measured. With several objectives no trial is pruned.
        options: Further options of each trial, such as ``--trainer.max_epochs=1``. ``{folder}``
            stands for a folder of the trial's own.
        out: Folder of the study.
        storage: File in that folder: ``.db`` for SQLite, ``.log`` for a journal.
        trials: Number of trials of the study after which no other one begins.
        epochs: Number of epochs, of all trials together, after which no other trial begins.
        seconds: Wall time of this call after which no other trial begins.
        max_failures: Number of trials that fail in a row after which the study ends.
        sampler: Class of optuna that chooses values, and its arguments, but for the seed.
        pruner: Class of optuna that ends a trial early, and its arguments.
        seed: Seed of the sampler; each time that a study goes on it is another one.
        skipped_batches: Batches at the beginning of a trial whose time does not count.
        recipe: What the file says of itself, for ``python -m recipes list``.

    Raises:
        ValueError: The base has no options, a number is too small, a condition names no parameter,
            or the storage has an unknown ending.
    """

    base: str
    space: dict[str, Parameter]
    objectives: dict[str, Literal["minimize", "maximize"]]
    options: list[str] = field(default_factory=list)
    out: str = "runs/tune"
    storage: str = "study.db"
    trials: int | None = 20
    epochs: int | None = None
    seconds: float | None = None
    max_failures: int = 3
    sampler: dict[str, Any] = field(
        default_factory=lambda: {"class_path": "optuna.samplers.TPESampler"}
    )
    pruner: dict[str, Any] | None = None
    seed: int = 0
    skipped_batches: int = 5
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without a trial."""
        if not Path(self.base).is_file():
            raise ValueError(
                f"base={self.base!r} is no file. Name a configuration of recipes.train."
            )
        if not isinstance(yaml.safe_load(Path(self.base).read_text()), dict):
            raise ValueError(
                f"base={self.base!r} has no options. Name a configuration of recipes.train."
            )
        if self.max_failures < 1:
            raise ValueError(f"max_failures={self.max_failures} must be 1 or more.")
        if not self.space or not self.objectives:
            raise ValueError("A study needs at least one parameter in `space` and one objective.")
        known: set[str] = set()
        for name, parameter in self.space.items():
            for other in parameter.when:
                if other not in known:
                    raise ValueError(
                        f"when={parameter.when} of {name!r} must name parameters that come before"
                        f" it: {', '.join(sorted(known)) or 'there are none'}."
                    )
            known.add(name)
        if Path(self.storage).suffix not in (".db", ".log"):
            raise ValueError(
                f"storage={self.storage!r} must end in .db (SQLite) or .log (a journal)."
            )
        if (self.trials, self.epochs, self.seconds) == (None, None, None):
            raise ValueError("A study needs an end: trials, epochs or seconds.")
        if self.pruner is not None and len(self.objectives) > 1:
            raise ValueError(
                f"pruner={self.pruner} needs one objective, and there are {len(self.objectives)}:"
                " optuna does not prune by several."
            )

    @property
    def definition(self) -> dict[str, Any]:
        """What trials of one study must have in common to be compared."""
        base = yaml.safe_load(Path(self.base).read_text())
        base.pop("recipe", None)
        parts = {
            "space": {name: asdict(parameter) for name, parameter in self.space.items()},
            "objectives": dict(self.objectives),
            "options": self.options,
            "base": base,
        }
        loaded: dict[str, Any] = json.loads(json.dumps(parts))
        return loaded

    def draw(self, trial: Suggests) -> dict[str, Value]:
        """Draws a value for each parameter whose condition holds.

        Args:
            trial: optuna's trial.

        Returns:
            Names and values.
        """
        values: dict[str, Value] = {}
        for name, parameter in self.space.items():
            if all(values.get(other) in wanted for other, wanted in parameter.when.items()):
                values[name] = parameter.draw(name, trial)
        return values

    def words(self, values: Mapping[str, Value]) -> list[str]:
        """Returns values as options of ``recipes.train``.

        Args:
            values: Names and values of parameters.
        """
        texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in values.items()}
        return [f"--{self.space[name].option}={text}" for name, text in texts.items()]

    @property
    def most_trials(self) -> float:
        """Number of trials, or infinity."""
        return inf if self.trials is None else self.trials


def spoken(values: Mapping[str, Value]) -> str:
    """Returns names and values as one line, with four digits of each number.

    Args:
        values: Names and values.
    """
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )


def find_differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Names what differs between two trees of dictionaries.

    Args:
        old: The tree that was.
        new: The tree that is.
        path: Path of both.

    Returns:
        A line for each leaf that differs.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        return [
            line
            for key in keys
            for line in find_differences(old.get(key), new.get(key), f"{path}.{key}".lstrip("."))
        ]
    return [] if old == new else [f"{path} was {old!r}, and is {new!r}"]
