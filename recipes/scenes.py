"""Scenes of handwritten digits, with a class for each pixel: segmentation without a download.

Each scene is 24 x 24 pixels of noise on which four images of ``load_digits`` lie, one in each
quarter, shifted at random. A pixel's class is its digit, or 10 for the background. Scenes for
validation and test have images that training has not seen.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from recipes.digits import NUM_CLASSES, load_images, split_indices
from recipes.text import SeededShuffle, replica_of

SIDE = 24
BACKGROUND = NUM_CLASSES
_HALF = SIDE // 2
_INK = 0.3  # brightness from which a pixel belongs to its digit
_NOISE = 0.15


def draw_scenes(images: Tensor, labels: Tensor, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draws scenes.

    Args:
        images: Digits, ``(N, 1, 8, 8)`` from 0 to 1.
        labels: Their classes, ``(N,)``.
        count: Number of scenes, ``S``.
        seed: Seed of the digits' choice, their places and the noise.

    Returns:
        Scenes, ``(S, 1, 24, 24)`` float32, and the class of each pixel, ``(S, 24, 24)`` int64.
    """
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(images), (count, 4), generator=generator)
    side = images.shape[-1]
    scenes = _NOISE * torch.rand(count, 1, SIDE, SIDE, generator=generator)
    classes = torch.full((count, SIDE, SIDE), BACKGROUND)
    shifts = torch.randint(_HALF - side + 1, (count, 4, 2), generator=generator)
    for scene in range(count):
        for quarter in range(4):
            corner = torch.tensor([quarter // 2, quarter % 2]) * _HALF + shifts[scene, quarter]
            top, left = corner.tolist()
            index = chosen[scene, quarter]
            place = slice(top, top + side), slice(left, left + side)
            scenes[scene, 0][place] += images[index, 0]
            ink = images[index, 0] > _INK
            classes[scene][place][ink] = labels[index]
    return scenes, classes


class ScenesDataModule(L.LightningDataModule):
    """Scenes of digits: batches of ``(B, 1, 24, 24)`` float32 and ``(B, 24, 24)`` int64.

    Args:
        batch_size: Scenes per batch and data replica.
        num_train: Scenes to train on; a quarter of it to validate on, and as many to test on.
        seed: Seed of the split, the scenes and the training order.

    Raises:
        ValueError: A number is too small.
    """

    def __init__(self, batch_size: int = 32, num_train: int = 2048, seed: int = 0) -> None:
        super().__init__()
        if batch_size < 1 or num_train < 4:
            raise ValueError(
                f"batch_size={batch_size} must be at least 1, and num_train={num_train} at least 4."
            )
        self.save_hyperparameters()
        self._batch_size = batch_size
        self._seed = seed
        images, labels = load_images()
        parts = split_indices(labels, seed)
        counts = num_train, num_train // 4, num_train // 4
        self._train, self._val, self._test = (
            TensorDataset(*draw_scenes(images[part], labels[part], count, seed + number))
            for number, (part, count) in enumerate(zip(parts, counts, strict=True))
        )

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        sampler = SeededShuffle(self._train, self._seed, len(self._train), **replica_of(self))
        return DataLoader(self._train, batch_size=self._batch_size, sampler=sampler)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._val, batch_size=self._batch_size)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self._test, batch_size=self._batch_size)

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return self.test_dataloader()
