"""The study, which the first rank owns: it chooses, prunes, remembers and counts."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import optuna
from lightning.pytorch.cli import instantiate_class
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from recipes.tuning.definition import Tuning, find_differences, spoken
from recipes.tuning.outcome import Order, Outcome, Report

NAME = "study"
_DEFINITION = "definition"
_NO_PRUNER = {"class_path": "optuna.pruners.NopPruner"}


class StudyOwner:
    """Asks optuna for trials and tells it what became of them.

    Args:
        tuning: The search.

    Attributes:
        study: optuna's study.

    Raises:
        ValueError: The folder holds a study of something else, or another process goes on with it.
    """

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning
        self._out = Path(tuning.out)
        self._out.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._out)
        self.study = optuna.create_study(
            study_name=NAME,
            storage=open_storage(self._out / tuning.storage),
            directions=list(tuning.objectives.values()),
            load_if_exists=True,
        )
        # The storage does not keep a sampler's state: with the same seed it would begin anew.
        seed = tuning.seed + len(self.study.trials)
        try:
            self._check_definition()
            self.study.sampler = _make(tuning.sampler, seed=seed)
            self.study.pruner = _make(tuning.pruner or _NO_PRUNER)
        except ValueError:
            self.close()
            raise
        self._redo_interrupted()
        self._start = time.monotonic()
        self._failures_in_a_row = 0
        self._is_exhausted = False
        self._trial: Trial | None = None
        self._trial_start = 0.0

    def close(self) -> None:
        """Lets another process have the study."""
        self._lock.close()

    def ask(self) -> Order | None:
        """Returns the next trial, or None if the budget is used up.

        Raises:
            ValueError: Too many trials have failed in a row.
        """
        failures = self._failures_in_a_row
        if failures >= self._tuning.max_failures:
            raise ValueError(
                f"The last {failures} trials have failed, the last one with:"
                f" {self.study.trials[-1].user_attrs.get('error')}"
            )
        if self._is_used_up():
            return None
        self._trial, self._trial_start = self.study.ask(), time.monotonic()
        values = self._tuning.draw(self._trial)
        folder = self._out / f"trial_{self._trial.number}"
        print(f"Trial {self._trial.number}: {spoken(values)}", flush=True)
        words = [
            f"--config={self._tuning.base}",
            "--trainer.default_root_dir={folder}",  # where the configuration is saved
            *self._tuning.options,
            *self._tuning.words(values),
        ]
        filled = tuple(word.replace("{folder}", str(folder)) for word in words)
        return Order(self._trial.number, filled, str(folder))

    def report(self, report: Report) -> bool:
        """Notes the objective at a validation, and returns whether to end the trial.

        Args:
            report: The objective.
        """
        assert self._trial is not None
        self._trial.report(report.value, report.step)
        return self._trial.should_prune()

    def tell(self, outcome: Outcome) -> None:
        """Notes what became of the trial that was asked for.

        Args:
            outcome: It.
        """
        assert self._trial is not None
        trial, seconds = self._trial, time.monotonic() - self._trial_start
        trial.set_user_attr("epochs", outcome.epochs)
        trial.set_user_attr("seconds", round(seconds, 1))
        if outcome.state == "failed":
            trial.set_user_attr("error", outcome.error)
            self._tell(trial, TrialState.FAIL)
            self._failures_in_a_row += 1
            where = self._out / f"trial_{trial.number}"
            print(f"Trial {trial.number} failed, see {where}: {outcome.error}", flush=True)
            return
        self._failures_in_a_row = 0
        if outcome.state == "pruned":
            self._tell(trial, TrialState.PRUNED)
            print(f"Trial {trial.number} was pruned after {outcome.epochs} epochs.", flush=True)
            return
        values = [outcome.values[name] for name in self._tuning.objectives]
        self._tell(trial, TrialState.COMPLETE, values)
        print(f"Trial {trial.number}: {spoken(outcome.values)} ({seconds:.0f} s)", flush=True)

    def _tell(self, trial: Trial, state: TrialState, values: Sequence[float] | None = None) -> None:
        try:
            self.study.tell(trial, values, state)
        except RuntimeError:  # of Study.stop: a sampler of a grid has no other values
            if not self.study.trials[trial.number].state.is_finished():
                raise
            self._is_exhausted = True

    def _is_used_up(self) -> bool:
        tuning, ended = self._tuning, self._ended()
        epochs = sum(trial.user_attrs.get("epochs", 0) for trial in ended)
        return (
            self._is_exhausted
            or len(ended) >= tuning.most_trials
            or (tuning.epochs is not None and epochs >= tuning.epochs)
            or (tuning.seconds is not None and time.monotonic() - self._start >= tuning.seconds)
        )

    def _ended(self) -> list[FrozenTrial]:
        """Returns the trials that have ended here; one that was interrupted has no time."""
        trials = self.study.trials
        return [t for t in trials if t.state.is_finished() and "seconds" in t.user_attrs]

    def _check_definition(self) -> None:
        new, old = self._tuning.definition, self.study.user_attrs.get(_DEFINITION)
        if old is None:
            self.study.set_user_attr(_DEFINITION, new)
        elif differences := find_differences(old, new):
            lines = "; ".join(differences[:5])
            raise ValueError(
                f"{self._out / self._tuning.storage} has a study of something else: {lines}. Name"
                " another folder with out=, or undo the change."
            )

    def _redo_interrupted(self) -> None:
        """Lets trials that an earlier process has begun and not ended begin anew."""
        for trial in self.study.get_trials(states=(TrialState.RUNNING,)):
            self.study.tell(trial.number, state=TrialState.FAIL)
            self.study.enqueue_trial(trial.params)


def open_storage(path: Path) -> BaseStorage:
    """Opens the file of a study, by its ending.

    Args:
        path: A file: ``.db`` for SQLite, ``.log`` for a journal.
    """
    if path.suffix == ".db":
        return RDBStorage(f"sqlite:///{path}")
    return JournalStorage(JournalFileBackend(str(path)))


def _make(described: dict[str, Any], **more: Any) -> Any:
    arguments = {**more, **described.get("init_args", {})}
    try:
        return instantiate_class((), {**described, "init_args": arguments})
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{described} is no class of optuna with such arguments: {error}"
        ) from error


def _lock(folder: Path) -> Any:
    lock = (folder / "lock").open("w")
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    lock.close()
    raise ValueError(f"Another process goes on with the study in {folder}. Wait for its end.")
