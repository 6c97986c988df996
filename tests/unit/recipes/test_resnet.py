from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import recipes.resnet
from recipes.digits import DigitsDataModule
from recipes.resnet import ResidualBlock, ResNet, build_resnet
from recipes.unet import Segmenter


def test_shapes_and_size_of_the_default_model() -> None:
    module = ResNet()
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    convolutions = 9 * (32 + 2 * 32**2 + 32 * 64 + 3 * 64**2) + 32 * 64
    norms = 2 * (3 * 32 + 5 * 64)
    assert sum(p.numel() for p in module.parameters()) == convolutions + norms + 10 * 65


def test_a_strided_block_halves_height_and_width() -> None:
    assert ResidualBlock(3, 5, stride=2)(torch.zeros(2, 3, 8, 8)).shape == (2, 5, 4, 4)


def test_a_fresh_block_is_its_shortcut() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 4, 4)
    assert torch.equal(ResidualBlock(3, 3)(x), x)


def test_all_parameters_are_trained_and_only_matrices_decay() -> None:
    module = ResNet(width=4, weight_decay=0.3)
    trainer: Any = SimpleNamespace(estimated_stepping_batches=10)
    module.trainer = trainer
    optimizer = module.configure_optimizers()["optimizer"]
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert set(decay) == set(module.parameters())
    for part in module.modules():
        for p in part.parameters(recurse=False):
            is_norm = isinstance(part, nn.BatchNorm2d)
            assert decay[p] == (0.0 if is_norm or p.ndim < 2 else 0.3)


def scheduler_of(module: L.LightningModule, num_steps: float) -> Any:
    trainer: Any = SimpleNamespace(estimated_stepping_batches=num_steps)
    module.trainer = trainer
    return module.configure_optimizers()["lr_scheduler"]["scheduler"]


def next_rates(scheduler: Any, num_steps: int) -> list[float]:
    rates = []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return rates


MODULES = [ResNet(width=4, learning_rate=0.5), Segmenter(width=4, depth=1, learning_rate=0.5)]


@pytest.mark.parametrize("module", MODULES, ids=["digits", "unet"])
def test_the_learning_rate_rises_and_falls_to_nothing(module: L.LightningModule) -> None:
    rates = next_rates(scheduler_of(module, 100), 101)
    assert rates[49] == rates[50] == max(rates) == pytest.approx(0.5)
    assert rates[:50] == sorted(rates[:50])
    assert rates[50:] == sorted(rates[50:], reverse=True)
    assert rates[100] == 0.0


@pytest.mark.parametrize("module", MODULES, ids=["digits", "unet"])
def test_a_run_may_have_no_end_and_a_checkpoint_more_epochs(module: L.LightningModule) -> None:
    assert next_rates(scheduler_of(module, math.inf), 100)[-1] == pytest.approx(0.5)
    first, longer = scheduler_of(module, 60), scheduler_of(module, 100)
    next_rates(first, 60)
    longer.load_state_dict(first.state_dict())
    rates = next_rates(longer, 40)
    assert rates[1:] == pytest.approx([0.5 * (100 - step) / 50 for step in range(61, 100)])


def test_the_loss_goes_down() -> None:
    torch.manual_seed(0)
    net = build_resnet(width=8)
    images, labels = next(iter(DigitsDataModule(batch_size=16).train_dataloader()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0


def test_the_module_knows_nothing_of_other_processes() -> None:
    source = inspect.getsource(recipes.resnet)
    for word in ("torch.distributed", "rank", "world_size", "num_replicas"):
        assert word not in source
