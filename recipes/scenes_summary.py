"""The results of a segmentation, in one short table and a picture at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from typing_extensions import override

from recipes.digits import NUM_CLASSES
from recipes.run_summary import TimedTraining, print_table, short_path, written_files
from recipes.scenes import BACKGROUND

_SHOWN = 4


class ScenesSummary(TimedTraining):
    """Prints a test's mean IoU beside that of background alone, and draws some scenes."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: tuple[Tensor, Tensor, Tensor] | None = None
        self._pixels = self._background = 0

    @override
    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._pixels += batch[1].numel()
        self._background += int((batch[1] == BACKGROUND).sum())
        if batch_idx == 0:
            scenes, classes = (part[:_SHOWN].cpu() for part in batch)
            self._shown = scenes, classes, outputs[:_SHOWN].cpu()

    @override
    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        iou = float(trainer.callback_metrics["test_iou"])
        # That answer has the background's pixels and no digit's.
        empty = self._background / max(1, self._pixels) / (1 + NUM_CLASSES)
        rows = [
            ("test IoU", f"{iou:.1%} (mean over the digits and the background)"),
            ("background alone", f"{empty:.1%}"),
        ]
        rows += [*self._training, *written_files(trainer)]
        if isinstance(trainer.logger, CSVLogger) and self._shown is not None:
            picture = Path(trainer.logger.log_dir) / "scenes.png"
            rows.append(("scenes", _draw(*self._shown, picture)))
        print_table(rows, section_ends=("background alone", "training"))


def _draw(scenes: Tensor, classes: Tensor, found: Tensor, picture: Path) -> str:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:  # matplotlib is optional: a finished run keeps its table
        return f"not drawn. {error}"
    figure = Figure(figsize=(2 * len(scenes), 6.5), layout="constrained")
    rows = {"scene": scenes[:, 0], "classes": classes, "found": found}
    for axes, (title, images) in zip(
        figure.subplots(len(rows), len(scenes), squeeze=False), rows.items(), strict=True
    ):
        axes[0].set_ylabel(title)
        for axis, image in zip(axes, images, strict=True):
            is_scene = title == "scene"
            limits = {} if is_scene else {"vmin": 0, "vmax": BACKGROUND}
            axis.imshow(image.numpy(), cmap="gray" if is_scene else "tab20", **limits)
            axis.set(xticks=[], yticks=[])
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    return short_path(picture)
