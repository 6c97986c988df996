"""The results of training on the digits, in one short table and a picture at its end."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from typing_extensions import override

from recipes.resnet import ResNet
from recipes.run_summary import TimedTraining, print_table, short_path, written_files

_SHOWN_MISTAKES = 3


class DigitsSummary(TimedTraining):
    """Prints a test's accuracy and mistakes, the training time, and the written files."""

    def __init__(self) -> None:
        super().__init__()
        self._confusion = torch.zeros(0, 0)

    @override
    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, ResNet)
        # Sums over the ranks. Collective: every rank must call it.
        self._confusion = pl_module.test_confusion.compute().cpu()

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        rows = [*quality(self._confusion), *self._training, *written_files(trainer)]
        if isinstance(trainer.logger, CSVLogger):
            picture = Path(trainer.logger.log_dir) / "confusion.png"
            rows.append(("confusion", _draw(self._confusion, picture)))
        print_table(rows, section_ends=("mistakes", "training"))


def quality(confusion: Tensor) -> list[tuple[str, str]]:
    """Describes a confusion matrix in two rows.

    Args:
        confusion: ``(C, C)`` counts; a row per true class, a column per predicted one.

    Returns:
        Names and values: the accuracy, and the most frequent mistakes.
    """
    total, right = int(confusion.sum()), int(confusion.diagonal().sum())
    wrong = confusion - confusion.diagonal().diag()
    pairs = [(int(wrong[i, j]), int(i), int(j)) for i, j in wrong.nonzero()]
    pairs.sort(key=lambda pair: (-pair[0], *pair[1:]))
    shown = [f"{i} taken for {j} ({count})" for count, i, j in pairs[:_SHOWN_MISTAKES]]
    return [
        ("test accuracy", f"{right / max(1, total):.2%} ({right} of {total} images)"),
        ("mistakes", ", ".join(shown) + (", ..." if len(pairs) > len(shown) else "") or "none"),
    ]


def _draw(confusion: Tensor, picture: Path) -> str:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:  # matplotlib is optional: a finished run keeps its table
        return f"not drawn. {error}"
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(confusion.numpy(), cmap="Blues")
    for i, j in confusion.nonzero().tolist():
        colour = "white" if i == j else "black"
        axes.text(j, i, str(int(confusion[i, j])), ha="center", va="center", color=colour)
    digits = range(len(confusion))
    axes.set(xlabel="predicted", ylabel="true", xticks=digits, yticks=digits)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    return short_path(picture)
