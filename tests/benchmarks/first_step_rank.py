"""A rank's program for :mod:`tests.benchmarks.first_step`: trains one step, and notes the times.

Imports are inside of functions, for a contestant pays for its own alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

TORCHRUN, LIGHTNINGS = "torch DDP, torchrun", "Lightning's DDPStrategy"
OURS, PIPELINE = "our DDPStrategy", "our PipelineStrategy, "
FOLDER = "FIRST_STEP_FOLDER"
WIDTH, DEPTH, BATCH, LENGTH, WORDS = 256, 8, 8, 128, 256

times = {"started": time.time()}


def note(mark: str) -> None:
    times.setdefault(mark, time.time())


def save() -> None:
    times["processor"] = time.process_time()
    rank = os.environ.get("LOCAL_RANK", "0")
    (Path(os.environ[FOLDER]) / f"{rank}.json").write_text(json.dumps(times))


def build_model() -> nn.Sequential:
    from torch import nn

    def block() -> nn.Module:
        return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)

    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH), *(block() for _ in range(DEPTH)), nn.Linear(WIDTH, WORDS)
    )


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def run_torch() -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    note("imported")
    dist.init_process_group("gloo")
    note("met")
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randint(WORDS, (BATCH, LENGTH))
    note("ready")
    loss_of(model(x), x).backward()
    optimizer.step()
    note("stepped")
    dist.destroy_process_group()


def strategy_of(name: str) -> Any:
    if name == LIGHTNINGS:
        from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy

        return LightningDDPStrategy()
    from lightning_dist import DDPStrategy, PipelineStrategy

    return DDPStrategy() if name == OURS else PipelineStrategy(schedule=name.removeprefix(PIPELINE))


def run_lightning(name: str) -> None:
    import lightning as L
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from typing_extensions import override

    strategy = strategy_of(name)
    note("imported")

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build_model()

        @override
        def training_step(self, batch: list[Tensor]) -> Tensor:
            return loss_of(self.model(batch[0]), batch[0])

        @override
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Marks(L.Callback):
        @override
        def setup(self, *_: Any, **__: Any) -> None:
            note("met")

        @override
        def on_train_batch_start(self, *_: Any) -> None:
            note("ready")

        @override
        def on_train_batch_end(self, *_: Any) -> None:
            note("stepped")

    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        callbacks=[Marks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    tokens = torch.randint(WORDS, (2 * BATCH, LENGTH))
    trainer.fit(Module(), DataLoader(TensorDataset(tokens), batch_size=BATCH))


if __name__ == "__main__":
    if sys.argv[1] == TORCHRUN:
        run_torch()
    else:
        run_lightning(sys.argv[1])
    save()
