"""The curves of the study in a CSV file, a row per look, so that nothing is trained twice."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from recipes.staleness.training import Look, Sizes
from recipes.staleness.trial import Method, Trial

_TRIAL = ("optimizer", "method", "stages", "rate_factor", "seed")
_SIZES = tuple(Sizes.__dataclass_fields__)
_LOOK = ("updates", "bits_per_byte")


class Results:
    """The results so far.

    Args:
        path: Path of the file, which is made if it is not there.
        sizes: Sizes of the trials to read; rows of other sizes stay in the file.
    """

    def __init__(self, path: Path, sizes: Sizes) -> None:
        self._path = path
        self._sizes = sizes
        self._curves: dict[tuple[str, ...], list[Look]] = {}
        if path.exists():
            self._read()

    def __contains__(self, trial: Trial) -> bool:
        """Returns whether a trial has been run."""
        return _key(trial) in self._curves

    def curve(self, trial: Trial) -> list[Look]:
        """Returns a trial's looks, in order.

        Args:
            trial: A trial that has been run.
        """
        return self._curves[_key(trial)]

    def add(self, trial: Trial, looks: Iterable[Look]) -> None:
        """Writes a trial to the file.

        Args:
            trial: The trial.
            looks: The looks of the trial.
        """
        found = list(looks)
        self._curves[_key(trial)] = found
        is_new = not self._path.exists()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", newline="") as file:
            writer = csv.writer(file)
            if is_new:
                writer.writerow((*_TRIAL, *_SIZES, *_LOOK))
            sizes = asdict(self._sizes).values()
            for look in found:
                writer.writerow((*_key(trial), *sizes, look.num_updates, repr(look.bits_per_byte)))

    def _read(self) -> None:
        wanted = {name: str(value) for name, value in asdict(self._sizes).items()}
        with self._path.open(newline="") as file:
            for row in csv.DictReader(file):
                if all(row[name] == value for name, value in wanted.items()):
                    key = tuple(row[name] for name in _TRIAL)
                    look = Look(int(row["updates"]), float(row["bits_per_byte"]))
                    curve = self._curves.setdefault(key, [])
                    if curve and look.num_updates <= curve[-1].num_updates:
                        curve.clear()  # two runs of the study at the same time: the last one counts
                    curve.append(look)


def _key(trial: Trial) -> tuple[str, ...]:
    method: Method = trial.method
    return (
        trial.optimizer,
        method.name,
        str(trial.num_stages),
        repr(trial.rate_factor),
        str(trial.seed),
    )
