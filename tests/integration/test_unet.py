"""A U-Net that is cut by tracing: skips travel past stages, and all equals one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy
from recipes.digits import load_images
from recipes.scenes import draw_scenes
from recipes.unet import Segmenter
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "1f1b": lambda: PipelineStrategy(layers="trace", num_microbatches=2),
    "zbv": lambda: PipelineStrategy(layers="trace", schedule="zbv", num_microbatches=4),
}


def train(name: str, num_ranks: int) -> tuple[dict[str, Tensor], float]:
    images, labels = load_images()
    scenes, classes = draw_scenes(images, labels, 16, seed=0)
    torch.manual_seed(5)
    module = Segmenter(width=4, depth=2).double()
    loader = DataLoader(TensorDataset(scenes.double(), classes), batch_size=8)
    trainer = make_trainer(devices=num_ranks, strategy=STRATEGIES[name]())
    trainer.fit(module, loader, loader)
    (metrics,) = trainer.validate(module, loader, verbose=False)
    found = {n: p.detach().clone() for n, p in module.named_parameters() if not p.is_meta}
    return found, metrics["val_iou"]


@pytest.mark.long  # test_trace.py trains another U-Net
@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_two_stages_equal_one_device(workers: WorkerPool, name: str) -> None:
    ((alone, iou),) = workers.run(1, train, "one", 1)
    parts = workers.run(2, train, name, 2)
    together = {key: value for part, _ in parts for key, value in part.items()}
    assert together.keys() == alone.keys()
    for key, value in alone.items():
        torch.testing.assert_close(together[key], value, rtol=0, atol=1e-12)
    assert [found for _, found in parts] == pytest.approx([iou, iou], abs=1e-6)
