"""A U-Net for segmentation (Ronneberger et al. 2015), whose skips cross pipeline stages.

It is no sequence and no list of blocks: each level of the way up takes what a level of the way down
has left. ``layers="trace"`` finds where it can be cut, and what travels past a stage.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassJaccardIndex
from typing_extensions import override

from recipes.gpt import warmup_and_decay
from recipes.scenes import BACKGROUND


class TwoConvolutions(nn.Module):
    """Two 3 x 3 convolutions, each with a norm of groups of channels and a ReLU.

    Args:
        in_channels: Channels that come in.
        out_channels: Channels that go out, a multiple of 4.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(4, out_channels)
        self.second = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(4, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, in, H, W)`` to ``(B, out, H, W)``."""
        x = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(x)))


class UNet(nn.Module):
    """Levels down, each with half the pixels and twice the channels, and up again.

    Args:
        width: Channels of the first level, a multiple of 4.
        depth: Levels below the first; the pixels of a side are to divide by ``2 ** depth``.
        num_classes: Logits per pixel.
    """

    def __init__(self, width: int = 16, depth: int = 2, num_classes: int = BACKGROUND + 1) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(map(TwoConvolutions, [1, *widths[:-1]], widths))
        self.grow = nn.ModuleList(
            nn.ConvTranspose2d(wide, narrow, 2, stride=2)
            for narrow, wide in zip(widths[-2::-1], widths[:0:-1], strict=True)
        )
        self.up = nn.ModuleList(TwoConvolutions(2 * narrow, narrow) for narrow in widths[-2::-1])
        self.logits = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, 1, H, W)`` to logits, ``(B, classes, H, W)``."""
        skips = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat([grow(x), skips.pop()], dim=1))
        logits: Tensor = self.logits(x)
        return logits


class Segmenter(L.LightningModule):
    """Trains a U-Net with AdamW, linear warm-up and linear decay.

    Args:
        width: As for :class:`UNet`, as the next two.
        depth: Levels below the first.
        num_classes: Classes of a pixel; the last one is the background.
        learning_rate: Peak learning rate.
        warmup_steps: Steps until the peak; 0 starts at the peak.
        weight_decay: Weight decay.
    """

    def __init__(
        self,
        width: int = 16,
        depth: int = 2,
        num_classes: int = BACKGROUND + 1,
        learning_rate: float = 1e-2,
        warmup_steps: int = 50,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = UNet(width, depth, num_classes)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.val_iou = MulticlassJaccardIndex(num_classes)
        self.test_iou = MulticlassJaccardIndex(num_classes)

    @override
    def forward(self, scenes: Tensor) -> Tensor:
        """Maps ``(B, 1, H, W)`` to logits, ``(B, classes, H, W)``."""
        logits: Tensor = self.model(scenes)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scenes, classes = batch
        loss = F.cross_entropy(self(scenes), classes)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scenes, classes = batch
        logits = self(scenes)
        self.val_iou.update(logits.argmax(dim=1), classes)
        self.log("val_loss", F.cross_entropy(logits, classes), sync_dist=True)
        self.log("val_iou", self.val_iou, prog_bar=True)

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scenes, classes = batch
        found = self(scenes).argmax(dim=1)
        self.test_iou.update(found, classes)
        self.log("test_iou", self.test_iou)
        return found

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=1)

    @override
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay
        )
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_and_decay(step, self.warmup_steps, total)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
