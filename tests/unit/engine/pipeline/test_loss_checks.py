"""Losses that are other ones where a batch is cut are told from means over samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.pipeline.loss_checks import Reductions, compares_samples
from lightning_dist.engine.pipeline.microbatch import Microbatch
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.block_parity import largest_difference
from tests.helpers.processes.threads import run_ranks, shapes_of


def plain_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


TARGETS = torch.tensor([0, 1, -100, 3, 2, 1])
LossOf = Callable[[Tensor], Tensor]


def info_nce(x: Tensor) -> Tensor:
    x = F.normalize(x)
    return F.cross_entropy(x @ x.T, torch.arange(len(x)))


def dice(x: Tensor) -> Tensor:
    y = torch.ones_like(x)
    return 1 - 2 * (x.sigmoid() * y).sum() / (x.sigmoid().sum() + y.sum())


COMPARING: dict[str, LossOf] = {
    "InfoNCE": info_nce,
    "columns of logits": lambda x: F.cross_entropy(x[:, :6].T, torch.arange(6)),
    "root of a mean": lambda x: x.square().mean().sqrt(),
    "variance": lambda x: -x.var(dim=0).mean(),
    "BatchNorm": lambda x: F.batch_norm(x, None, None, training=True).pow(3).mean(),
    "dice of a batch": dice,
}
MEANS: dict[str, LossOf] = {
    "cross-entropy": lambda x: F.cross_entropy(x, TARGETS),
    "mean squares": lambda x: x.square().mean(),
    "LayerNorm": lambda x: F.layer_norm(x, (8,)).pow(3).mean(),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(6, 2, 4)] * 3).square().mean(),
    "a sum of a linear one": lambda x: x.sum(),
    "dice of each sample": lambda x: torch.stack([dice(row) for row in x]).mean(),
    "scaled by itself": lambda x: F.cross_entropy(x, TARGETS) * x.square().mean().detach(),
}


def made(*shape: int, **options: Any) -> tuple[list[Tensor], Tensor]:
    """What a stage has received, and an output made of it."""
    received = torch.randn(*shape, **options).requires_grad_()
    return [received], received * 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*COMPARING, *MEANS])
def test_a_loss_that_compares_samples_is_told_from_a_mean(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    inputs, outputs = made(6, 8, dtype=dtype)
    loss = (COMPARING | MEANS)[name](outputs)
    before = torch.random.get_rng_state()
    assert compares_samples(loss, [outputs], inputs, 6) == (name in COMPARING)
    assert torch.equal(torch.random.get_rng_state(), before)
    loss.backward()  # the graph is still there


def test_towers_are_looked_at_together() -> None:
    received, images = made(4, 8)
    texts = received[0].flip(1) * 1.0
    loss = F.cross_entropy(images @ texts.T, torch.arange(4))
    assert compares_samples(loss, [images, torch.ones(()), texts], received, 4)


@pytest.mark.parametrize("are_neighbours", [False, True], ids=["joined views", "tokens"])
def test_a_sample_may_have_several_rows(are_neighbours: bool) -> None:
    inputs, outputs = made(12, 8)
    by_sample = outputs.view(4, 3, 8) if are_neighbours else outputs.view(3, 4, 8).transpose(0, 1)
    of_samples = by_sample.mean(dim=1)
    assert compares_samples(of_samples.square().mean(), [outputs], inputs, 4) is False
    assert compares_samples(info_nce(of_samples), [outputs], inputs, 4)


def test_one_sample_cannot_tell_nor_can_rows_of_time_or_of_parameters() -> None:
    inputs, outputs = made(5, 5, 8)
    over_time = outputs.mean(dim=0).square().mean()
    assert compares_samples(over_time, [outputs], inputs, 5) is None
    assert compares_samples(over_time, [outputs[:1]], inputs, 1) is None
    logarithms = nn.Parameter(torch.ones(2))  # of two tasks, beside micro-batches of two samples
    for rows in (logarithms, logarithms.expand(2, 2)):
        loss = rows.exp().sum() * rows.square().sum()
        assert compares_samples(loss, [rows], inputs, 2) is None


def test_large_outputs_are_left_alone() -> None:
    inputs, outputs = made(4, (1 << 18) + 1)
    assert compares_samples(outputs.var(dim=0).mean(), [outputs], inputs, 4) is None


def test_hooks_of_outputs_run_once() -> None:
    inputs, outputs = made(4, 8)
    kept = inputs[0] * 1.0
    kept.retain_grad()
    calls: list[Tensor] = []
    outputs.register_hook(calls.append)
    loss = info_nce(outputs) + info_nce(kept)
    assert compares_samples(loss, [outputs, kept], inputs, 4) is None
    loss.backward()
    assert len(calls) == 1
    assert kept.grad is not None


class Square(torch.autograd.Function):
    """Has a second derivative for autograd, and may have told other ranks something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def test_a_function_of_the_users_is_not_run_again() -> None:
    inputs, outputs = made(4, 8)
    assert compares_samples(outputs.square().mean().sqrt(), [outputs], inputs, 4)
    loss = Square.apply(outputs).mean().sqrt()  # type: ignore[no-untyped-call]
    assert compares_samples(loss, [outputs], inputs, 4) is False
    beneath = Square.apply(outputs)  # type: ignore[no-untyped-call]
    assert compares_samples(beneath.mean().sqrt(), [beneath], inputs, 4)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "interleaved_1f1b"])
def test_a_pipeline_warns_of_a_loss_that_compares_samples(schedule: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    batches = list(torch.randn(2, 8, 4, dtype=torch.float64))
    config = PipelineConfig(schedule, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest_difference(model, batches, plain_loss, config) < 1e-13
    with pytest.warns(
        UserWarning, match=r"`training_step` are cut into micro-batches of 4"
    ) as caught:
        assert largest_difference(model, batches, lambda m, x: info_nce(m(x)), config) > 1e-6
    assert len(caught) == 1


IGNORED = torch.tensor([0, 1, 2, 3, 0, 1, 2, -100])  # the second half has fewer targets
CLASSES = torch.tensor([1.0, 2.0, 3.0, 4.0])


def masked_mean(logits: Tensor, targets: Tensor) -> Tensor:
    each = F.cross_entropy(logits, targets, reduction="none")
    return each.sum() / (targets >= 0).sum()


OTHER_MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "ignored": F.cross_entropy,
    "class weights": partial(F.cross_entropy, weight=CLASSES),
    "smoothed": partial(F.cross_entropy, label_smoothing=0.1),
    "images": lambda logits, targets: F.cross_entropy(logits[..., None], targets[:, None]),
    "a mask": masked_mean,
    "a mean of selected ones": lambda x, y: (x - 1).square()[y >= 0].mean(),
    "a loss of selected ones": lambda x, y: F.mse_loss(x[y >= 0], x[y >= 0] * 0),
    "probabilities": lambda x, y: F.binary_cross_entropy_with_logits(x[y >= 0], x[y >= 0].sign()),
    "in a sum": lambda x, y: 0.5 * (x.square().mean() - F.cross_entropy(x, y)).double().view(()),
}
SAME_MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a constant": lambda x, y: F.cross_entropy(x, y, reduction="sum") / 4,
    "none ignored": lambda x, y: F.cross_entropy(x, y.clamp(min=0)),
    "scaled logits": lambda x, y: (x.square() / (y >= 0).sum()).mean(),
    "a sum and a factor": lambda x, y: F.mse_loss(x, x * 0, reduction="sum") * (1 / len(y)),
    "a sum of each sample": lambda x, y: x.square().sum(-1).mean(),
    "a sum of two losses": lambda x, y: torch.stack([x.mean(), x.square().mean()] * 2).sum(),
    "a weighted one": lambda x, y: (torch.stack([x.mean()] * 4) * torch.ones(4)).sum(),
    "of squares": lambda x, y: F.mse_loss(x, x * 0) + F.smooth_l1_loss(x, x * 0),
    "a sum over classes": lambda x, y: x.square().mean(0)[:3].sum(),
}
SUMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropies": partial(F.cross_entropy, reduction="sum"),
    "squares": lambda x, y: F.mse_loss(x, torch.zeros_like(x), reduction="sum"),
    "an ELBO": lambda x, y: (
        F.binary_cross_entropy_with_logits(x, torch.ones_like(x), reduction="sum")
        - 0.5 * (x - x.exp()).sum()
    ),
    "distances": lambda x, y: F.l1_loss(x, torch.zeros_like(x), reduction="sum"),
    "by hand": lambda x, y: -x.log_softmax(-1)[range(len(y)), y.clamp(min=0)].sum() + x.mean(),
    "of sums": lambda x, y: x.square().sum(-1).sum(),
}


def reduce(loss_of: Callable[[Tensor, Tensor], Tensor], *sizes: int) -> None:
    reductions, x = Reductions(), torch.randn(8, 4).requires_grad_()
    for logits, targets in zip(x.split(sizes), IGNORED.split(sizes), strict=True):
        reductions.note(loss_of(logits, targets), len(targets))
    reductions.compare()


@pytest.mark.parametrize("name", OTHER_MEANS)
def test_means_over_other_numbers_than_samples_are_warned_of(name: str) -> None:
    with pytest.warns(UserWarning, match="mean over something that micro-batches have different"):
        reduce(OTHER_MEANS[name], 4, 4)


@pytest.mark.parametrize("name", SAME_MEANS)
def test_means_over_samples_are_not(name: str) -> None:
    reduce(SAME_MEANS[name], 4, 4)
    reduce(SAME_MEANS[name], 3, 5)


@pytest.mark.parametrize("name", SUMS)
def test_sums_over_samples_are_warned_of_once(name: str) -> None:
    with pytest.warns(UserWarning, match="sum over samples.*of 4 samples, are averaged") as caught:
        reduce(SUMS[name], 4, 4)
    assert len(caught) == 1


def test_a_sum_over_weights_is_none_over_samples() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    batches = list(torch.randn(2, 8, 4, dtype=torch.float64))

    def penalised(module: nn.Module, batch: Tensor) -> Tensor:
        loss = module(batch).square().mean()  # on the last stage it has the weights
        return loss + sum(p.square().sum() for p in module[3].parameters())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert largest_difference(model, batches, penalised, PipelineConfig("1f1b", 2)) < 1e-13


def test_a_pipeline_averages_sums_and_warns() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    batches = list(torch.randn(2, 8, 4, dtype=torch.float64))

    def of_squares(module: nn.Module, batch: Tensor) -> Tensor:
        return F.mse_loss(module(batch), batch, reduction="sum")

    with pytest.warns(UserWarning, match="The loss is a sum over samples") as caught:
        assert largest_difference(model, batches, of_squares, PipelineConfig("1f1b", 2)) > 1e-6
    assert len(caught) == 1


def test_a_pipeline_warns_once_of_a_mean_over_targets() -> None:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double()
    batches = [(x, IGNORED) for x in torch.randn(2, 8, 4, dtype=torch.float64)]

    def of_targets(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(module(batch[0]), batch[1])

    with pytest.warns(UserWarning, match="from 3 to 4 in micro-batches of 4 samples") as caught:
        assert largest_difference(model, batches, of_targets, PipelineConfig("1f1b", 2)) > 1e-6
    assert len(caught) == 1


def run_alone(train: Callable[[nn.Sequential, Pipeline], None], num_microbatches: int = 2) -> None:
    """Runs two stages in this process; a warning is an error."""
    shapes = shapes_of("interleaved_1f1b", num_microbatches, (1, 1), num_ranks=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), shapes, train)


def test_a_pipeline_sums_over_a_whole_batch_without_a_warning() -> None:
    def train(model: nn.Sequential, pipeline: Pipeline) -> None:
        pipeline.train_batch(torch.randn(8, 4), lambda part: model(part.content).square().sum())

    run_alone(train, num_microbatches=1)
    with pytest.raises(UserWarning, match="sum over samples"):
        run_alone(train)


def test_a_pipeline_that_knows_the_weight_does_not() -> None:
    def train(model: nn.Sequential, pipeline: Pipeline) -> None:
        def step(microbatch: Microbatch) -> Any:
            x, y = microbatch.content
            return {"loss": F.cross_entropy(model(x), y), "weight": (y >= 0).sum()}

        pipeline.train_batch((torch.randn(8, 4), IGNORED), step)

    run_alone(train)


def test_a_batch_that_failed_is_not_compared_with_the_next() -> None:
    def train(model: nn.Sequential, pipeline: Pipeline) -> None:
        def step(microbatch: Microbatch) -> Tensor:
            x, y = microbatch.content
            if not x.isfinite().all():
                raise ZeroDivisionError
            return F.cross_entropy(model(x), y)

        x = torch.randn(8, 4)
        with pytest.raises(ZeroDivisionError):
            pipeline.train_batch((torch.cat([x[:4], x[4:] / 0]), IGNORED), step)
        pipeline.clear()
        pipeline.train_batch((x, IGNORED[4:].repeat(2)), step)

    run_alone(train)
