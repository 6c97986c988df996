from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recipes.digits import (
    DigitsDataModule,
    LabelledImages,
    load_images,
    random_shift,
    split_indices,
)


def read(loader: Any) -> torch.Tensor:
    return torch.cat([images for images, _ in loader])


def test_the_images() -> None:
    images, labels = load_images()
    assert (images.shape, images.dtype) == ((1797, 1, 8, 8), torch.float32)
    assert (images.min(), images.max()) == (0.0, 1.0)
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_split_has_each_image_once_and_each_digit_in_the_same_share() -> None:
    labels = load_images()[1]
    parts = split_indices(labels, seed=0)
    assert [len(part) for part in parts] == [1197, 240, 360]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1797))
    whole = labels.bincount() / len(labels)
    for part in parts:
        counts = labels[part].bincount()
        assert (counts - whole * len(part)).abs().max() < 1.0


def test_the_split_depends_on_its_seed_alone() -> None:
    labels = load_images()[1]
    first = split_indices(labels, seed=0)
    torch.manual_seed(5)
    assert all(torch.equal(a, b) for a, b in zip(first, split_indices(labels, 0), strict=True))
    assert not torch.equal(first[2], split_indices(labels, seed=1)[2])


def test_a_shift_moves_all_pixels_alike() -> None:
    torch.manual_seed(0)
    image = torch.zeros(1, 8, 8)
    image[0, 3, 4] = 1.0
    image[0, 4, 4] = 2.0
    seen = set()
    for _ in range(200):
        moved = random_shift(image, max_shift=1)
        assert moved.shape == image.shape
        assert moved.sum() == 3.0
        (row, column) = (moved[0] == 1.0).nonzero()[0].tolist()
        assert moved[0, row + 1, column] == 2.0
        seen.add((row - 3, column - 4))
    assert seen == {(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)}


def test_what_is_shifted_out_is_lost() -> None:
    torch.manual_seed(0)
    corner = torch.zeros(1, 8, 8)
    corner[0, 0, 0] = 1.0
    sums = {float(random_shift(corner, max_shift=1).sum()) for _ in range(50)}
    assert sums == {0.0, 1.0}


def test_training_images_are_shifted_by_the_global_generator() -> None:
    images, labels = load_images()
    data = LabelledImages(images[:20], labels[:20], max_shift=1)
    torch.manual_seed(1)
    first = torch.stack([data[i][0] for i in range(20)])
    again = torch.stack([data[i][0] for i in range(20)])
    torch.manual_seed(1)
    assert torch.equal(first, torch.stack([data[i][0] for i in range(20)]))
    assert not torch.equal(first, again)


def test_the_order_of_training_depends_on_seed_and_epoch_alone() -> None:
    data = DigitsDataModule(max_shift=0)
    first = read(data.train_dataloader())
    torch.manual_seed(7)
    assert torch.equal(first, read(data.train_dataloader()))


def test_validation_and_test_images_are_as_they_were() -> None:
    images, labels = load_images()
    _, val, test = split_indices(labels, seed=0)
    data = DigitsDataModule()
    assert torch.equal(read(data.val_dataloader()), images[val])
    assert torch.equal(read(data.test_dataloader()), images[test])
    assert torch.equal(read(data.predict_dataloader()), images[test])


@pytest.mark.parametrize("num_replicas", [2, 7])  # 7 divides neither 240 nor 360
def test_replicas_evaluate_each_image_once(num_replicas: int) -> None:
    shares = []
    for rank in range(num_replicas):
        data = DigitsDataModule()
        kwargs = {"num_replicas": num_replicas, "rank": rank}
        trainer: Any = SimpleNamespace(distributed_sampler_kwargs=kwargs)
        data.trainer = trainer
        shares.append(read(data.val_dataloader()))
    everything = read(DigitsDataModule().val_dataloader())
    assert sum(len(share) for share in shares) == len(everything) == 240
    for rank, share in enumerate(shares):
        assert torch.equal(share, everything[rank::num_replicas])


@pytest.mark.parametrize(
    ("argument", "value"), [("batch_size", 0), ("max_shift", -1), ("max_shift", 8)]
)
def test_bad_sizes_of_the_data(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        DigitsDataModule(**{argument: value})
