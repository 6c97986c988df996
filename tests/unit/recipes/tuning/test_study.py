from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.tuning.definition import Parameter, Tuning
from recipes.tuning.outcome import Order, Outcome, Report

optuna = pytest.importorskip(
    "optuna", reason="optuna is not installed: pip install 'lightning-dist[tune]'"
)
from recipes.tuning.report import report  # noqa: E402
from recipes.tuning.study import StudyOwner  # noqa: E402

CONFIGS = Path(__file__).parents[4] / "recipes" / "configs"
GRID = "optuna.samplers.GridSampler"
Owns = Callable[[Tuning], StudyOwner]


@pytest.fixture
def own() -> Iterator[Owns]:
    owners: list[StudyOwner] = []

    def make(tuning: Tuning) -> StudyOwner:
        for owner in owners:
            owner.close()
        owners.append(StudyOwner(tuning))
        return owners[-1]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield make
    for owner in owners:
        owner.close()
        if isinstance(owner.study._storage, optuna.storages._CachedStorage):
            owner.study._storage._backend.engine.dispose()


@pytest.fixture
def tuning(tmp_path: Path) -> Tuning:
    return Tuning(
        base=str(CONFIGS / "gpt_single.yaml"),
        space={"rate": Parameter("model.learning_rate", 0.1, 1.0)},
        objectives={"val_loss": "minimize"},
        options=["--trainer.logger.init_args.save_dir={folder}"],
        out=str(tmp_path / "out"),
        storage="study.log",
        trials=3,
    )


def rate_of(order: Order | None) -> float:
    assert order is not None
    return float(order.words[-1].removeprefix("--model.learning_rate="))


def complete(loss: float = 1.0, epochs: int = 2) -> Outcome:
    return Outcome("complete", {"val_loss": loss}, epochs)


@pytest.mark.parametrize("storage", ["study.db", "study.log"])
def test_a_study_goes_on_in_another_process_with_other_values(
    own: Owns, tuning: Tuning, storage: str
) -> None:
    rates, tuning = [], replace(tuning, storage=storage)
    for _ in range(3):
        owner = own(tuning)
        rates.append(rate_of(owner.ask()))
        owner.tell(complete())
    assert len(set(rates)) == 3
    assert own(tuning).ask() is None  # three trials of the study, not of a process


def test_a_trial_has_a_folder_of_its_own(own: Owns, tuning: Tuning) -> None:
    order = own(tuning).ask()
    assert order is not None
    assert order.folder == f"{tuning.out}/trial_0"
    assert f"--trainer.default_root_dir={order.folder}" in order.words
    assert f"--trainer.logger.init_args.save_dir={order.folder}" in order.words


def test_a_trial_that_was_interrupted_begins_anew_with_its_values(
    own: Owns, tuning: Tuning
) -> None:
    interrupted = rate_of(own(tuning).ask())
    owner = own(tuning)
    assert rate_of(owner.ask()) == interrupted
    owner.tell(complete())
    for _ in range(2):  # the interrupted one has used up nothing
        assert owner.ask() is not None
        owner.tell(complete())
    assert owner.ask() is None


def test_budgets(own: Owns, tuning: Tuning) -> None:
    owner = own(replace(tuning, trials=None, epochs=4))
    for _ in range(2):
        assert owner.ask() is not None
        owner.tell(complete(epochs=2))
    assert owner.ask() is None
    assert own(replace(tuning, trials=None, epochs=5)).ask() is not None
    assert own(replace(tuning, seconds=0.0)).ask() is None


def test_another_search_space_is_refused(own: Owns, tuning: Tuning) -> None:
    owner = own(tuning)
    owner.ask()
    owner.tell(complete())
    other = replace(tuning, space={"rate": Parameter("model.learning_rate", 0.1, 2.0)})
    with pytest.raises(ValueError, match=r"space\.rate\.high was 1\.0, and is 2\.0.*another"):
        own(other)
    with pytest.raises(ValueError, match="objectives.val_loss was 'minimize'"):
        own(replace(tuning, objectives={"val_loss": "maximize"}))
    assert len(own(tuning).study.trials) == 1


def test_a_failed_trial_fails_alone_and_many_in_a_row_end_the_study(
    own: Owns, tuning: Tuning
) -> None:
    owner = own(replace(tuning, trials=9))
    for outcome in [Outcome("failed", error="first"), complete()]:
        owner.ask()
        owner.tell(outcome)
    for _ in range(3):
        owner.ask()
        owner.tell(Outcome("failed", error="OutOfMemoryError: no memory"))
    with pytest.raises(ValueError, match=r"last 3 trials.*OutOfMemoryError: no memory"):
        owner.ask()
    states = [trial.state.name for trial in owner.study.trials]
    assert states == ["FAIL", "COMPLETE", "FAIL", "FAIL", "FAIL"]


def test_a_trial_worse_than_the_median_is_pruned(own: Owns, tuning: Tuning) -> None:
    pruner: dict[str, Any] = {
        "class_path": "optuna.pruners.MedianPruner",
        "init_args": {"n_startup_trials": 1},
    }
    owner = own(replace(tuning, pruner=pruner))
    owner.ask()
    assert not owner.report(Report(1.0, 0))
    owner.tell(complete())
    owner.ask()
    assert owner.report(Report(2.0, 0))
    owner.tell(Outcome("pruned", epochs=1))
    assert [trial.state.name for trial in owner.study.trials] == ["COMPLETE", "PRUNED"]


def test_the_front_is_printed_and_drawn(
    own: Owns, tuning: Tuning, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    both: dict[str, Any] = {"val_loss": "minimize", "tokens_per_second": "maximize"}
    owner = own(replace(tuning, objectives=both))
    for loss, rate in [(1.0, 100.0), (2.0, 300.0), (3.0, 200.0)]:
        owner.ask()
        owner.tell(Outcome("complete", {"val_loss": loss, "tokens_per_second": rate}, 1))
    capsys.readouterr()
    report(owner.study, replace(tuning, objectives=both))
    printed = capsys.readouterr().out
    assert "3 trials complete" in printed
    assert [line[:4] for line in printed.splitlines() if line.startswith("│")] == ["│ 0 ", "│ 1 "]
    option = f"--trainer.logger.init_args.save_dir={tuning.out}/best"
    assert f"fit --config={tuning.base} {option} --model.learning_rate=" in printed
    assert printed.endswith("\nBest val_loss: 1\n")
    for name in ("history.html", "slices.html", "pareto.html", "pareto.png"):
        assert Path(tuning.out, name).exists()


def test_a_grid_ends_the_study(own: Owns, tuning: Tuning) -> None:
    grid = {"search_space": {"rate": [0.2, 0.4]}}
    owner = own(replace(tuning, sampler={"class_path": GRID, "init_args": grid}))
    rates = set()
    while (order := owner.ask()) is not None:
        rates.add(rate_of(order))
        owner.tell(complete())
    assert rates == {0.2, 0.4}
    assert [trial.state.name for trial in owner.study.trials] == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("name", ["optuna.samplers.Nothing", "nothing.Sampler", "TPESampler"])
def test_an_unknown_sampler_is_refused(own: Owns, tuning: Tuning, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.*is no class of optuna"):
        own(replace(tuning, sampler={"class_path": name}))


def test_a_study_has_one_owner(own: Owns, tuning: Tuning) -> None:
    owner = own(tuning)
    with pytest.raises(ValueError, match="Another process goes on with the study"):
        StudyOwner(tuning)
    owner.close()
