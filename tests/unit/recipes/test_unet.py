"""Scenes of digits and the U-Net that colours them."""

from __future__ import annotations

import pytest
import torch

from recipes.digits import load_images
from recipes.scenes import BACKGROUND, SIDE, ScenesDataModule, draw_scenes
from recipes.unet import UNet


def test_a_scene_has_four_digits_whose_ink_has_their_class() -> None:
    images, labels = load_images()
    scenes, classes = draw_scenes(images, labels, 5, seed=3)
    assert scenes.shape == (5, 1, SIDE, SIDE)
    half = SIDE // 2
    for scene, of_pixels in zip(scenes[:, 0], classes, strict=True):
        for top in (0, half):
            for left in (0, half):
                quarter = of_pixels[top : top + half, left : left + half]
                found = set(quarter.unique().tolist())
                assert BACKGROUND in found
                assert len(found) == 2
        assert scene[of_pixels != BACKGROUND].min() > scene[of_pixels == BACKGROUND].median()


def test_the_same_seed_draws_the_same_scenes() -> None:
    images, labels = load_images()
    first, again, other = (draw_scenes(images, labels, 3, seed)[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_each_level_sees_what_the_way_down_has_left() -> None:
    net = UNet(width=4, depth=2)
    scenes = torch.randn(2, 1, SIDE, SIDE)
    assert net(scenes).shape == (2, BACKGROUND + 1, SIDE, SIDE)
    net(scenes).sum().backward()
    # Of the first level's output a half of the last block's weights is for.
    weight = net.up[-1].first.weight
    assert weight.shape[1] == 8
    assert weight.grad is not None
    assert weight.grad[:, 4:].abs().sum() > 0


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        ScenesDataModule(batch_size=0)


def test_the_test_scenes_are_predicted() -> None:
    data = ScenesDataModule(batch_size=4, num_train=16)
    (tested,), (predicted,) = data.test_dataloader(), data.predict_dataloader()
    assert torch.equal(predicted[0], tested[0])


def test_the_order_of_training_depends_on_seed_and_epoch_alone() -> None:
    data = ScenesDataModule(batch_size=16, num_train=16)
    (first,) = data.train_dataloader()
    torch.manual_seed(7)
    (again,) = data.train_dataloader()
    assert torch.equal(first[0], again[0])
