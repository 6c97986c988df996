"""The results of fine-tuning on docstrings, in one short table at its end."""

from __future__ import annotations

from collections.abc import Sequence

import lightning as L
from typing_extensions import override

from recipes.class_baselines import bag_of_words_accuracy, majority_accuracy
from recipes.docstring_data import DocstringDataModule
from recipes.docstrings import Docstring
from recipes.run_summary import TimedTraining, print_table, written_files


class DocstringSummary(TimedTraining):
    """Prints a test's accuracy beside its baselines, the training time, and the written files."""

    places = 0

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        rows = [*_quality(trainer), *self._training, *written_files(trainer)]
        print_table(rows, section_ends=("majority baseline", "training"))


def _quality(trainer: L.Trainer) -> list[tuple[str, str]]:
    data = trainer.datamodule
    accuracy = trainer.callback_metrics.get("test_accuracy")
    if accuracy is None or not isinstance(data, DocstringDataModule):
        return []
    train, val, test = (
        _columns(part)
        for part in (data.train_docstrings, data.val_docstrings, data.test_docstrings)
    )
    return [
        ("test accuracy", f"{accuracy:.1%} (of {len(test[0])} docstrings of unseen modules)"),
        ("bag of words baseline", f"{bag_of_words_accuracy(train, val, test):.1%}"),
        ("majority baseline", f"{majority_accuracy(train[1], test[1]):.1%}"),
    ]


def _columns(docstrings: Sequence[Docstring]) -> tuple[list[str], list[int]]:
    return [d.text for d in docstrings], [d.area for d in docstrings]
