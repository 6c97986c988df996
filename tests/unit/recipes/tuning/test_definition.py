from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.tune import parse
from recipes.tuning.definition import Parameter, Tuning, Value, find_differences

CONFIGS = Path(__file__).parents[4] / "recipes" / "configs"


class Draws:
    """Stands for optuna's trial: takes the values that it is given, and notes the ranges."""

    def __init__(self, **values: Value) -> None:
        self.values = values
        self.seen: dict[str, Any] = {}

    def suggest_categorical(self, name: str, choices: list[Value]) -> Any:
        self.seen[name] = choices
        return self.values.get(name, choices[0])

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        self.seen[name] = (low, high, step, log)
        return low

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        self.seen[name] = (low, high, step, log)
        return high


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parents[1])


@pytest.mark.parametrize(
    ("schedule", "drawn"),
    [
        ("1f1b", {"num_microbatches": 2}),
        ("pipedream", {"pipedream_correction": "none"}),
        ("pipedream_2bw", {"num_microbatches": 2, "two_versions_correction": "none"}),
    ],
)
def test_what_does_not_go_with_a_schedule_is_not_drawn(
    schedule: str, drawn: dict[str, Value]
) -> None:
    tuning = parse([f"--config={CONFIGS / 'tune_gpt.yaml'}"])
    draws = Draws(schedule=schedule)
    values = tuning.draw(draws)
    rate = {"learning_rate": 0.02, "warmup_steps": 0}
    assert values == {**rate, "schedule": schedule, **drawn}
    assert draws.seen["learning_rate"] == (0.001, 0.02, None, True)
    assert draws.seen["warmup_steps"] == (0, 50, 1, False)
    assert f"--trainer.strategy.init_args.schedule={schedule}" in tuning.words(values)
    assert "--model.warmup_steps=0" in tuning.words(values)


def test_each_value_that_may_be_drawn_is_an_option_of_the_base(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from recipes.command_line import run

    tuning = parse([f"--config={CONFIGS / 'tune_gpt.yaml'}"])
    for schedule in tuning.space["schedule"].choices or ():
        words = tuning.words(tuning.draw(Draws(schedule=schedule)))
        arguments = ["fit", f"--config={tuning.base}", *tuning.options, *words, "--print_config"]
        monkeypatch.setattr("sys.argv", ["recipes.train", *arguments])
        with pytest.raises(SystemExit) as stopped:
            run()
        assert stopped.value.code == 0


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "either low and high, or choices"),
        ({"low": 1}, "either low and high, or choices"),
        ({"low": 1, "high": 2, "choices": [1]}, "either low and high, or choices"),
        ({"choices": []}, "no choices"),
        ({"low": 3, "high": 2}, "must not be larger than high=2"),
        ({"low": 0, "high": 2, "log": True}, "low above 0"),
    ],
)
def test_a_parameter_needs_a_range(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Parameter("model.x", **entries)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"base": "nix.yaml"}, "base='nix.yaml' is no file"),
        ({"base": str(Path(__file__).with_name("__init__.py"))}, "has no options"),
        ({"max_failures": 0}, "max_failures=0 must be 1 or more"),
        ({"space": {}}, "at least one parameter"),
        ({"space": {"a": Parameter("x", 0, 1, when={"b": [1]})}}, "come before it: there are none"),
        ({"storage": "study.csv"}, "must end in .db"),
        ({"trials": None}, "needs an end"),
        ({"pruner": {"class_path": "optuna.pruners.MedianPruner"}}, "does not prune by several"),
    ],
)
def test_a_study_is_checked(changed: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "base": str(CONFIGS / "gpt_single.yaml"),
        "space": {"width": Parameter("model.width", 16, 32)},
        "objectives": {"val_loss": "minimize", "tokens_per_second": "maximize"},
    }
    Tuning(**good)
    with pytest.raises(ValueError, match=message):
        Tuning(**{**good, **changed})


def test_differences_are_named() -> None:
    old = {"space": {"rate": {"low": 1, "high": 2}}, "options": ["a"]}
    new = {"space": {"rate": {"low": 1, "high": 3}, "depth": 1}, "options": ["a"]}
    assert find_differences(old, old) == []
    assert find_differences(old, new) == [
        "space.rate.high was 2, and is 3",
        "space.depth was None, and is 1",
    ]
