"""Real images without a download: the handwritten digits that scikit-learn ships.

``load_digits`` holds 1797 images of 8 x 8 pixels, ten classes of about 180 each (UCI, Optical
Recognition of Handwritten Digits). They are few, so the training images are shifted at random.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from recipes.text import SeededShuffle, replica_of

try:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
except ImportError as error:
    raise ImportError(
        "The digits are scikit-learn's. Use `pip install 'lightning-dist[recipes]'`."
    ) from error

NUM_CLASSES = 10
VALIDATION_IMAGES = 240
TEST_IMAGES = 360
BRIGHTEST = 16.0


def load_images() -> tuple[Tensor, Tensor]:
    """Loads all images.

    Returns:
        Images, ``(1797, 1, 8, 8)`` float32 from 0 to 1, and their digits, ``(1797,)`` int64.
    """
    digits = load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1) / BRIGHTEST
    return images, torch.from_numpy(digits.target).long()


def split_indices(labels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Divides the images for training, validation and test, each digit in the same shares.

    Args:
        labels: The digit of each image, ``(N,)``.
        seed: Seed of the division; other seeds give other images.

    Returns:
        Indices of the three parts, each image in one of them.
    """
    everything = torch.arange(len(labels)).numpy()
    kept, test = train_test_split(
        everything, test_size=TEST_IMAGES, stratify=labels, random_state=seed
    )
    train, val = train_test_split(
        kept, test_size=VALIDATION_IMAGES, stratify=labels[kept], random_state=seed
    )
    return torch.from_numpy(train), torch.from_numpy(val), torch.from_numpy(test)


def random_shift(image: Tensor, max_shift: int) -> Tensor:
    """Shifts an image along both axes, and fills the free pixels with black.

    Draws from torch's global generator.

    Args:
        image: ``(C, H, W)``.
        max_shift: Pixels in either direction.

    Returns:
        The moved image, of the same shape.
    """
    height, width = image.shape[-2:]
    top, left = torch.randint(2 * max_shift + 1, (2,)).tolist()
    padded = F.pad(image, [max_shift] * 4)
    return padded[:, top : top + height, left : left + width]


class LabelledImages(Dataset[tuple[Tensor, Tensor]]):
    """Images with their digits.

    Args:
        images: ``(N, 1, 8, 8)``.
        labels: ``(N,)``.
        max_shift: Pixels by which an image is moved at random, anew each time it is read.
    """

    def __init__(self, images: Tensor, labels: Tensor, max_shift: int = 0) -> None:
        self._images = images
        self._labels = labels
        self._max_shift = max_shift

    def __len__(self) -> int:
        """Returns the number of images."""
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Returns an image, ``(1, 8, 8)``, and its digit, a scalar."""
        image = self._images[index]
        if self._max_shift:
            image = random_shift(image, self._max_shift)
        return image, self._labels[index]


class DigitsDataModule(L.LightningDataModule):
    """Handwritten digits: 1197 for training, 240 for validation, 360 for test.

    Batches are ``(images, labels)``, float32 of shape ``(batch_size, 1, 8, 8)`` and int64 of shape
    ``(batch_size,)``.

    Data replicas share the images out. Training leaves some of an epoch's last images out where
    their number does not divide. Validation and test have a sampler that repeats none, so that each
    image counts once on any number of replicas.

    Args:
        batch_size: Images per batch and process.
        max_shift: Pixels by which training images are moved at random.
        seed: Seed of the split and the training order.
        num_workers: Processes that load data; the images are in memory, so none are needed.

    Raises:
        ValueError: The batch is empty, or images are moved by less than none or out of sight.
    """

    def __init__(
        self, batch_size: int = 32, max_shift: int = 1, seed: int = 0, num_workers: int = 0
    ) -> None:
        super().__init__()
        images, labels = load_images()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size} must be at least 1.")
        if not 0 <= max_shift < images.shape[-1]:
            raise ValueError(
                f"max_shift={max_shift} must be at least 0 and below {images.shape[-1]}, the pixels"
                " of a side."
            )
        self.save_hyperparameters()
        self._batch_size = batch_size
        self._seed = seed
        self._num_workers = num_workers
        train, val, test = split_indices(labels, seed)
        self._train = LabelledImages(images[train], labels[train], max_shift)
        self._val = LabelledImages(images[val], labels[val])
        self._test = LabelledImages(images[test], labels[test])

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            self._train,
            batch_size=self._batch_size,
            sampler=SeededShuffle(self._train, self._seed, len(self._train), **replica_of(self)),
            num_workers=self._num_workers,
        )

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader(self._val)

    @override
    def test_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader(self._test)

    @override
    def predict_dataloader(self) -> DataLoader[Any]:
        return self._evaluation_loader(self._test)

    def _evaluation_loader(self, data: LabelledImages) -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_size=self._batch_size,
            sampler=UnrepeatedDistributedSampler(data, shuffle=False, **replica_of(self)),
            num_workers=self._num_workers,
        )
