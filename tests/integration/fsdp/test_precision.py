"""Mixed precision follows its own recursion: two replicas in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.func import functional_call

from lightning_dist import FSDPStrategy
from lightning_dist.engine.tensors.dtensor import whole
from lightning_dist.wrap import AnyOf, ByClass, EachBlock, With
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

NUM_SAMPLES = 40
KEEP_NORMS = AnyOf([With(ByClass(["LayerNorm"]), keep_fp32=True), EachBlock()])


class Single(Classifier):
    """Takes the samples of the tests, which are in double precision."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.model(x.to(self.dtype)), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))


class NormInSingle(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).to(x.dtype)


def fit(precision: str, options: dict[str, Any]) -> dict[str, Tensor]:
    module = make_module(Single).float()
    trainer = make_trainer(devices=2, strategy=FSDPStrategy(**options), precision=precision)
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return state_of(module)


@contextmanager
def one_thread() -> Iterator[None]:
    """The order of a sum depends on the threads, and with it the last digit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def reference(
    compute: torch.dtype, reduce: torch.dtype, *, keep_norms: bool = False
) -> dict[str, Tensor]:
    module = make_module(Single).float()
    for layer in module.model if keep_norms else ():
        if hasattr(layer, "norm"):
            layer.norm.__class__ = NormInSingle
    optimizer = make_optimizer("sgd", module.parameters())
    for batches in zip(*(share_of(rank, NUM_SAMPLES) for rank in range(2)), strict=True):
        gradients = []
        for x, y in batches:
            weights = {
                name: (p if keep_norms and ".norm." in f".{name}" else p.to(compute)).detach()
                for name, p in module.model.named_parameters()
            }
            weights = {name: w.requires_grad_() for name, w in weights.items()}
            with torch.autocast("cpu", compute):
                logits = functional_call(module.model, weights, x.to(compute))
                loss = F.cross_entropy(logits, y)
            gradients.append(torch.autograd.grad(loss, list(weights.values())))
        for parameter, first, second in zip(module.parameters(), *gradients, strict=True):
            parameter.grad = ((first.to(reduce) + second.to(reduce)) / 2).to(parameter.dtype)
        optimizer.step()
    return state_of(module)


BF16 = torch.bfloat16


@pytest.mark.some("options1-*")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"reduce": torch.float32}),
        ({"reduce_dtype": "bfloat16"}, {"reduce": BF16}),
        ({"wrap": KEEP_NORMS}, {"reduce": torch.float32, "keep_norms": True}),
    ],
)
def test_mixed_precision_follows_its_recursion(
    workers: WorkerPool, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    state = reference(BF16, **expected)
    for found in workers.run(2, fit, "bf16-mixed", options):
        for name, value in state.items():
            assert found[name].dtype == value.dtype == torch.float32
            assert float((found[name] - value).abs().max()) < 1e-7, name


def test_the_recursions_differ() -> None:
    one = reference(BF16, torch.float32)
    for other in (reference(BF16, BF16), reference(BF16, torch.float32, keep_norms=True)):
        assert any(float((one[n] - other[n]).abs().max()) > 1e-6 for n in one)


class KeepsGradients(Single):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {n: whole(p.grad).clone() for n, p in self.named_parameters()}


def gradients_in_true_half_precision() -> dict[str, Tensor]:
    module = make_module(KeepsGradients).float()
    trainer = make_trainer(devices=2, strategy=FSDPStrategy(), precision="bf16-true", max_steps=1)
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return module.gradients


def test_true_half_precision_sends_what_it_computes(workers: WorkerPool) -> None:
    # Only gradients: the last digit of a step in half precision depends on the tensor's length.
    module = make_module(Single).to(BF16)
    gradients = []
    with one_thread():
        for rank in range(2):
            module.zero_grad()
            module.training_step(next(iter(share_of(rank, NUM_SAMPLES))), 0).backward()
            gradients.append({n: p.grad.clone() for n, p in module.named_parameters()})
    for found in workers.run(2, gradients_in_true_half_precision):
        for name, value in found.items():
            assert torch.equal(value, (gradients[0][name] + gradients[1][name]) / 2), name


class Explodes(Single):
    """In its second step one element of one parameter, on one shard, has no finite gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            loss = loss + self.model[7].weight[-1, -1] * float("inf")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.states.append(state_of(self))


def fit_with_scaler(module_class: type[Single]) -> Any:
    module = make_module(module_class).float()
    module.states = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    trainer = make_trainer(devices=2, strategy=FSDPStrategy(), plugins=[plugin])
    trainer.fit(module, share_of(int(os.environ["RANK"]), NUM_SAMPLES), make_loader(8))
    return state_of(module), module.states, scaler.get_scale()


def test_all_ranks_skip_a_step_that_one_shard_cannot_take(workers: WorkerPool) -> None:
    for _, states, scale in workers.run(2, fit_with_scaler, Explodes):
        assert scale == 2.0**9
        for name, before in states[0].items():
            assert torch.equal(states[1][name], before), name
            assert torch.isfinite(states[-1][name]).all()
        assert any(not torch.equal(states[2][n], states[1][n]) for n in states[1])


def test_a_scaled_loss_follows_the_unscaled_recursion(workers: WorkerPool) -> None:
    state = reference(torch.float16, torch.float32)
    for found, _, scale in workers.run(2, fit_with_scaler, Single):
        assert scale == 2.0**10
        for name, value in state.items():
            # A power of two changes no digit but of the smallest numbers.
            assert float((found[name] - value).abs().max()) < 1e-6, name
