"""What a study has found: a table, optuna's pictures, and the command of the best trial."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import optuna
import optuna.visualization as plots
from optuna.exceptions import ExperimentalWarning
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console
from rich.table import Table

from recipes.tuning.definition import Tuning, spoken

_SHOWN = 10


def report(study: optuna.Study, tuning: Tuning) -> None:
    """Prints the best trials and writes pictures into the study's folder.

    Args:
        study: The study.
        tuning: What it has searched.
    """
    complete = study.get_trials(states=(TrialState.COMPLETE,))
    print(f"{_counts(study)} in {Path(tuning.out) / tuning.storage}.")
    if not complete:
        return
    # Of trials with one objective only one is best; the next ones are of interest, too.
    names = list(tuning.objectives)
    sign = 1 if tuning.objectives[names[0]] == "minimize" else -1
    candidates = study.best_trials if len(names) > 1 else complete
    best = sorted(candidates, key=lambda trial: sign * trial.values[0])[:_SHOWN]
    _print_table(best, names)
    for path in _draw(study, names, Path(tuning.out)):
        print(f"Written: {path}")
    out = str(Path(tuning.out) / "best")
    options = [option.replace("{folder}", out) for option in tuning.options]
    words = [f"--config={tuning.base}", *options, *tuning.words(best[0].params)]
    print(f"The best by {names[0]}: python -m recipes.train fit {shlex.join(words)}")
    print(f"Best {names[0]}: {best[0].values[0]:.5g}")


def _counts(study: optuna.Study) -> str:
    states = [trial.state for trial in study.trials]
    counts = [(state.name.lower(), states.count(state)) for state in TrialState]
    return ", ".join(f"{count} trials {name}" for name, count in counts if count)


def _print_table(trials: Sequence[FrozenTrial], names: list[str]) -> None:
    title = "No other trial is better in all objectives" if len(names) > 1 else "Best trials"
    table = Table("trial", *names, "parameters", title=title)
    for trial in trials:
        numbers = (f"{value:.5g}" for value in trial.values)
        table.add_row(str(trial.number), *numbers, spoken(trial.params))
    console = Console()
    (console if console.is_terminal else Console(width=140)).print(table)


def _draw(study: optuna.Study, names: list[str], out: Path) -> list[Path]:
    """Writes the pages of plotly, and a picture of matplotlib; returns their paths."""
    several = len(names) > 1
    first = {"target": lambda trial: trial.values[0], "target_name": names[0]} if several else {}
    figures = {
        "history": plots.plot_optimization_history(study, **first),
        "slices": plots.plot_slice(study, **first),
    }
    if several:
        figures["pareto"] = plots.plot_pareto_front(study, target_names=names)
    paths = []
    for name, figure in figures.items():
        paths.append(out / f"{name}.html")
        figure.write_html(paths[-1], include_plotlyjs="directory")
    if several and find_spec("matplotlib") is not None:
        paths.append(out / "pareto.png")
        _draw_front(study, names, paths[-1])
    return paths


def _draw_front(study: optuna.Study, names: list[str], path: Path) -> None:
    import matplotlib.pyplot as plt
    from optuna.visualization.matplotlib import plot_pareto_front

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        figure = plot_pareto_front(study, target_names=names).figure
    figure.savefig(path, dpi=80)
    plt.close(figure)
