"""Layers that draw, count or run twice: dropout, BatchNorm, recomputed activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.networks.models import make_data, make_optimizer
from tests.helpers.oracle import train_late
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with

PARTITIONS = {
    "gpipe": (2, 3),
    "1f1b": (2, 3),
    "zb_h1": (2, 3),
    "zbv": (1, 1, 1, 2),
    "pipedream": (2, 3),
    "pipedream_2bw": (2, 3),
}
NUM_MICROBATCHES = 2
Make = Callable[[], nn.Sequential]


class Layer(nn.Module):
    """Convolutions and norms save their weights for the backward without a version check."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.conv = nn.Conv1d(2, 2, 3, padding=1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.conv(self.norm(x))))


class Recomputed(Layer):
    """Computes its activations anew in the backward, as users write it."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class Reentrant(Recomputed):
    reentrant = True


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(x)) + x


class Sharing(nn.Module):
    """Has two norms that count into the same buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Counting(), Counting()
        for name, buffer in self.first.norm.named_buffers():
            setattr(self.second.norm, name, buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def made_of(*layers: Callable[[], nn.Module]) -> Make:
    def make() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(
            *(layer() for layer in layers), nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
        ).double()

    return make


def batches(count: int) -> list[Any]:
    return list(torch.utils.data.DataLoader(make_data(8 * count), batch_size=8))


def step(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return make_optimizer("sgd", parameters)


def fit(
    schedule: str, make: Make, num_batches: int = 3, replica: int = 0, **options: Any
) -> dict[str, Tensor]:
    count = 1 if schedule == "pipedream" else NUM_MICROBATCHES
    shapes = shapes_of(schedule, count, PARTITIONS[schedule])
    shapes = [replace(shape, replica_index=replica) for shape in shapes]
    ranks = run_ranks(make, shapes, train_with(sgd, batches(num_batches), step), **options)
    return {name: value for rank in ranks for name, value in rank.items()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-12)


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left)


# --- recomputed activations ----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "pipedream", "pipedream_2bw"])
def test_recomputed_activations_are_those_of_the_forward(schedule: str) -> None:
    kept = fit(schedule, made_of(*4 * [lambda: Layer(0.5)]))
    recomputed = fit(schedule, made_of(*4 * [lambda: Recomputed(0.5)]))
    assert_equal(recomputed, kept)


@pytest.mark.parametrize("versions", ["vertical_sync", "none"])
def test_recomputed_activations_have_the_version_that_is_asked_for(versions: Any) -> None:
    kept = fit("pipedream", made_of(*4 * [lambda: Layer(0.5)]), weight_versions=versions)
    recomputed = fit("pipedream", made_of(*4 * [lambda: Recomputed(0.5)]), weight_versions=versions)
    assert_equal(recomputed, kept)


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "pipedream_2bw"])
def test_the_other_kind_of_checkpoint_recomputes_as_well(schedule: str) -> None:
    kept = fit(schedule, made_of(*4 * [lambda: Layer(0.5)]))
    recomputed = fit(schedule, made_of(lambda: Layer(0.5), *3 * [lambda: Reentrant(0.5)]))
    assert_equal(recomputed, kept)


def test_torch_says_what_to_do_where_it_parts_a_backward() -> None:
    with pytest.raises(RuntimeError, match="set use_reentrant=False"):
        fit("zb_h1", made_of(lambda: Layer(0.5), *3 * [lambda: Reentrant(0.5)]))


# --- dropout -------------------------------------------------------------------------------------


def test_what_layers_draw_depends_on_neither_schedule_nor_timing() -> None:
    make = made_of(*4 * [lambda: Layer(0.5)])
    expected = fit("gpipe", make)
    for schedule in ("1f1b", "zb_h1"):
        assert_equal(fit(schedule, make), expected)
    assert largest_difference(fit("gpipe", make, seed=1), expected) > 1e-6
    assert largest_difference(fit("gpipe", make, replica=1), expected) > 1e-6


def test_without_stash_the_backward_draws_what_the_forward_drew() -> None:
    make = made_of(*4 * [lambda: Layer(0.5)])
    # Of one batch, which is never stale.
    assert_equal(fit("pipedream", make, 1, weight_versions="none"), fit("pipedream", make, 1))


def test_each_stage_batch_and_micro_batch_draws_its_own() -> None:
    drawn: list[float] = []

    class Drawing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append(float(torch.rand(())))
            return super().forward(x)

    fit("1f1b", made_of(*4 * [lambda: Drawing(0.0)]))
    assert len(set(drawn)) == len(drawn) == 4 * 3 * NUM_MICROBATCHES


# --- BatchNorm -----------------------------------------------------------------------------------


class InPieces(nn.Module):
    """What one device computes that accumulates gradients over these micro-batches."""

    def __init__(self, model: nn.Module, count: int) -> None:
        super().__init__()
        self.model = model
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.model(piece) for piece in x.chunk(self.count)])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "pipedream", "pipedream_2bw"])
def test_running_statistics_are_those_of_accumulation_over_the_micro_batches(
    schedule: str,
) -> None:
    make = made_of(lambda: Layer(0.0), Counting, Counting, lambda: Layer(0.0))
    found = fit(schedule, make)
    expected = make()
    age = {"pipedream": lambda name: int(name.split(".")[1] in "01"), "pipedream_2bw": lambda _: 1}
    train_late(
        InPieces(expected, 1 if schedule == "pipedream" else NUM_MICROBATCHES),
        sgd(expected.parameters()),
        batches(3),
        F.cross_entropy,
        drains=(),
        staleness=age.get(schedule, lambda _: 0),
    )
    assert_equal(found, {n: t.detach() for n, t in expected.state_dict().items()})


@pytest.mark.parametrize("counting", [Counting, Sharing])
def test_without_stash_a_micro_batch_counts_once(counting: type[nn.Module]) -> None:
    make = made_of(lambda: Layer(0.0), counting, counting, lambda: Layer(0.0))
    assert_equal(fit("pipedream", make, 1, weight_versions="none"), fit("pipedream", make, 1))
