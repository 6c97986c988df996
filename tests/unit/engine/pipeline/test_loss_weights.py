"""Losses that are no means over samples give the undivided batch's gradient, however it is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.pipeline.loss_weights import LossWeights
from lightning_dist.engine.pipeline.microbatch import Loss, weight_of
from tests.helpers.networks.models import make_optimizer
from tests.helpers.oracle import train_late
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with

WORDS, IGNORED = 7, -100
Batch = tuple[Tensor, Tensor]


def make() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Embedding(WORDS, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, WORDS)
    ).double()


def make_batches(count: int = 4, rows: int = 6) -> list[Batch]:
    """Rows of which some words are ignored; of the first row of each batch, all."""
    generator = torch.Generator().manual_seed(6)
    batches = []
    for _ in range(count):
        tokens = torch.randint(0, WORDS, (rows, 5), generator=generator)
        ignored = torch.rand(rows, 5, generator=generator) < torch.linspace(1, 0.1, rows)[:, None]
        batches.append((tokens, tokens.flip(1).masked_fill(ignored, IGNORED)))
        assert bool(ignored[0].all())
    return batches


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Means over words; of none it is nan, and so is its gradient."""
    counted = (targets != IGNORED).flatten()
    known = targets.flatten().clamp(min=0)
    losses = F.cross_entropy(logits.flatten(0, 1), known, reduction="none")
    return (losses * counted).sum() / counted.sum()


def weighed(model: nn.Module, batch: Batch) -> dict[str, Any]:
    targets = batch[1]
    return {"loss": loss_of(model(batch[0]), targets), "weight": (targets != IGNORED).sum()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return make_optimizer("sgd", parameters)


def whole(batches: list[Batch]) -> Batch:
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


SCHEDULES = {
    "gpipe": (2, 2),
    "1f1b": (2, 2),
    "zb_h1": (2, 2),
    "zbv": (1, 1, 1, 1),
    "interleaved_1f1b": (1, 1, 1, 1),
    "pipedream_2bw": (2, 2),
}


@pytest.mark.parametrize(
    ("schedule", "accumulate"),
    [
        (name, count)
        for name in SCHEDULES
        for count in (1, 2)
        if name != "pipedream_2bw" or count == 1
    ],
)
def test_the_gradient_is_the_undivided_batch_s(schedule: str, accumulate: int) -> None:
    is_late = schedule == "pipedream_2bw"
    batches = make_batches()
    # In micro-batches of one row, the first of which weighs nothing.
    shapes = shapes_of(schedule, 6, SCHEDULES[schedule])
    ranks = run_ranks(make, shapes, train_with(sgd, batches, weighed, accumulate))
    expected = make()
    joined = [whole(batches[i : i + accumulate]) for i in range(0, len(batches), accumulate)]
    optimizer = sgd(expected.parameters())
    train_late(expected, optimizer, joined, loss_of, (), staleness=lambda _: int(is_late))
    found = {name: value for state in ranks for name, value in state.items()}
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("schedule", "accumulate"), [("1f1b", 1), ("1f1b", 2), ("zbv", 2)])
def test_gradients_kept_over_an_update_are_divided_once(schedule: str, accumulate: int) -> None:
    batches = make_batches(8)
    shapes = shapes_of(schedule, 3, SCHEDULES[schedule])
    ranks = run_ranks(make, shapes, train_with(sgd, batches, weighed, accumulate, clear_every=2))
    expected = make()
    optimizer = sgd(expected.parameters())
    for number, first in enumerate(range(0, len(batches), accumulate), 1):
        tokens, targets = whole(batches[first : first + accumulate])
        loss_of(expected(tokens), targets).backward()
        optimizer.step()
        if number % 2 == 0:
            optimizer.zero_grad()
    found = {name: value for state in ranks for name, value in state.items()}
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)


def halve(parameter: nn.Parameter) -> None:
    parameter.register_hook(lambda gradient: gradient * 0.5)


def clamp(parameter: nn.Parameter) -> None:
    def divide(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.div_(1.0 + 50.0 * parameter.grad.abs().max())

    parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    parameter.register_post_accumulate_grad_hook(divide)


@pytest.mark.parametrize(
    ("schedule", "hook", "accumulate"),
    [("1f1b", clamp, 1), ("zbv", clamp, 1), ("1f1b", halve, 2)],
)
def test_hooks_see_the_weighted_mean(
    schedule: str, hook: Callable[[nn.Parameter], None], accumulate: int
) -> None:
    def make_hooked() -> nn.Sequential:
        model = make()
        for parameter in model.parameters():
            hook(parameter)
        return model

    batches = make_batches()
    shapes = shapes_of(schedule, 3, SCHEDULES[schedule])
    ranks = run_ranks(make_hooked, shapes, train_with(sgd, batches, weighed, accumulate))
    expected = make_hooked()
    optimizer = sgd(expected.parameters())
    for first in range(0, len(batches), accumulate):
        tokens, targets = whole(batches[first : first + accumulate])
        loss_of(expected(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {name: value for state in ranks for name, value in state.items()}
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)


def test_a_parameter_of_two_stages_of_a_rank_is_divided_once() -> None:
    def make_tied() -> nn.Sequential:
        model = make()
        model[3].weight = model[0].weight
        return model

    batches = make_batches()
    shapes = shapes_of("zbv", 3, (1, 1, 1, 1))  # the first rank has the first and the last stage
    ranks = run_ranks(make_tied, shapes, train_with(sgd, batches, weighed))
    expected = make_tied()
    train_late(expected, sgd(expected.parameters()), batches, loss_of, (), staleness=lambda _: 0)
    for name, value in expected.named_parameters():
        found = next(rank[name] for rank in ranks if name in rank)
        torch.testing.assert_close(found, value.detach(), rtol=0, atol=1e-12)


def test_under_pipedream_a_weight_alone_changes_nothing() -> None:
    batches = make_batches()
    shapes = shapes_of("pipedream", 1, (2, 2))
    ranks = run_ranks(make, shapes, train_with(sgd, batches, weighed))
    plain = run_ranks(
        make, shapes, train_with(sgd, batches, lambda model, b: weighed(model, b)["loss"])
    )
    for rank, other in zip(ranks, plain, strict=True):
        for name, value in rank.items():
            torch.testing.assert_close(value, other[name], rtol=0, atol=1e-13)


def test_a_batch_without_weight_changes_nothing() -> None:
    (tokens, targets), *_ = make_batches(1)
    batches = [(tokens, torch.full_like(targets, IGNORED))]
    shapes = shapes_of("1f1b", 3, (2, 2))

    def plain(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)

    ranks = run_ranks(make, shapes, train_with(plain, batches, weighed))
    before = dict(make().named_parameters())
    for rank in ranks:
        assert all(torch.equal(value, before[name]) for name, value in rank.items())


@pytest.mark.parametrize("first", [0, 1])
def test_some_with_and_some_without_a_weight_are_refused(first: int) -> None:
    calls: list[int] = []

    def step(model: nn.Module, batch: Batch) -> Any:
        found = weighed(model, batch)
        calls.append(1)  # only the last stage comes here
        return found if len(calls) % 2 == first else found["loss"]

    shapes = shapes_of("1f1b", 2, (2, 2))
    with pytest.raises(ValueError, match=r"Some training steps returned a 'weight'.*or never"):
        run_ranks(make, shapes, train_with(sgd, make_batches(), step))


@pytest.mark.parametrize("weight", [-1, float("nan"), torch.ones(2), "many", None])
def test_a_weight_must_be_a_number(weight: Any) -> None:
    with pytest.raises(ValueError, match="'weight': .*one finite number"):
        Loss.of({"loss": torch.ones(()), "weight": weight})


def test_a_weight_is_only_one_beside_a_loss() -> None:
    assert weight_of({"weight": 3}) is None
    assert weight_of(torch.ones(())) is None
    assert weight_of({"loss": 0, "weight": torch.ones(4, 2)}) is None
    assert weight_of({"loss": 0, "weight": torch.tensor([3])}) == 3.0
    with pytest.raises(ValueError, match="under 'loss'"):
        Loss.of({"weight": 3})


def test_each_micro_batch_counts_once_and_each_update_for_itself() -> None:
    seen: list[float | None] = []

    def average(weight: float | None) -> float | None:
        seen.append(weight)
        return weight

    weights = LossWeights(average)
    for stage in range(2):  # of one rank
        weights.note(0, 0, 2.0)
        weights.note(0, 1, torch.tensor(3.0, dtype=torch.float64))
        weights.note(1, 2, 5.0 + 0.0 * stage)
    gradient = torch.tensor([10.0])
    weights.collect(0)
    weights.divide([gradient])
    assert float(gradient) == 2.0
    weights.collect(1)
    weights.collect(2)
    weights.divide([gradient])
    assert float(gradient) == pytest.approx(0.4)
    assert seen == [5.0, 5.0]


def test_nothing_is_divided_where_the_samples_count() -> None:
    weights = LossWeights(lambda weight: weight)
    weights.note(0, 0, None)
    gradient = torch.tensor([10.0])
    weights.collect(0)
    weights.divide([gradient])
    assert float(gradient) == 10.0
