"""A small residual network as a sequence of layers, and its LightningModule.

Blocks of two convolutions with BatchNorm (He et al. 2016); the last norm of each starts at zero, so
that a fresh block is its shortcut (Goyal et al. 2017). AdamW with linear warm-up and linear decay.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix
from typing_extensions import override

from recipes.gpt import warmup_and_decay


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut around them.

    Args:
        in_channels: Channels that come in.
        out_channels: Channels that go out.
        stride: Factor by which height and width shrink.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        nn.init.zeros_(self.norm2.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, in, H, W)`` to ``(B, out, H / stride, W / stride)``."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(hidden)))


class Stem(nn.Module):
    """Pixels to channels.

    Args:
        width: Channels that go out.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 1, H, W)`` to ``(B, width, H, W)``."""
        return F.relu(self.norm(self.conv(images)))


class Head(nn.Module):
    """Channels to logits.

    Args:
        width: Channels that come in.
        num_classes: Logits.
    """

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.logits = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``(B, width, H, W)`` to ``(B, num_classes)``."""
        logits: Tensor = self.logits(x.mean(dim=(2, 3)))
        return logits


def build_resnet(width: int = 32, num_classes: int = 10) -> nn.Sequential:
    """Builds the model.

    Args:
        width: Channels of the first half; the second has twice as many.
        num_classes: Logits.

    Returns:
        Stem, three blocks and head; maps ``(B, 1, H, W)`` images to ``(B, num_classes)`` logits.
    """
    return nn.Sequential(
        Stem(width),
        ResidualBlock(width, width),
        ResidualBlock(width, 2 * width, stride=2),
        ResidualBlock(2 * width, 2 * width),
        Head(2 * width, num_classes),
    )


class ResNet(L.LightningModule):
    """Classifies small grey images.

    Accuracies are counts, which torchmetrics adds up over the replicas, and the loss is weighted by
    batch size: both are right for shares of any size.

    Args:
        width: Channels of the first half; the second has twice as many.
        num_classes: Classes.
        learning_rate: Peak learning rate.
        warmup_steps: Steps until the peak; 0 starts at the peak.
        weight_decay: Weight decay of convolutions and the last matrix; norms and biases have none.
    """

    def __init__(
        self,
        width: int = 32,
        num_classes: int = 10,
        learning_rate: float = 1e-2,
        warmup_steps: int = 50,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = build_resnet(width, num_classes)
        self.learning_rate = learning_rate
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_confusion = MulticlassConfusionMatrix(num_classes)

    @override
    def forward(self, images: Tensor) -> Tensor:
        """Maps ``(B, 1, H, W)`` images to ``(B, num_classes)`` logits."""
        logits: Tensor = self.model(images)
        return logits

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy.update(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    @override
    def on_test_epoch_start(self) -> None:
        self.test_confusion.reset()  # Lightning resets only logged metrics, and logs no matrix

    @override
    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.test_accuracy.update(logits, labels)
        self.test_confusion.update(logits, labels)
        self.log("test_accuracy", self.test_accuracy)

    @override
    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0]).argmax(dim=-1)

    @override
    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
            lr=self.learning_rate,
            weight_decay=self.weight_decay,
        )
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_and_decay(step, self.warmup_steps, total)
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
