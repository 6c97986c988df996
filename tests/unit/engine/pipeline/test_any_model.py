"""Whatever layers hand on, hold and freeze: each schedule gives what it must for any model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.pipeline.runtime import WeightedGradients
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.rounds import Rounds
from lightning_dist.engine.tensors.tree import tensors_in
from tests.helpers.networks.models import make_optimizer
from tests.helpers.oracle import train_late
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with

WIDTH, WORDS = 6, 11


@dataclass
class Text:
    """What the second half hands on: trained, not trained, whole numbers and a name."""

    hidden: Tensor
    scale: Tensor
    tokens: Tensor
    name: str = "text"


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        hidden = self.weight(tokens)
        return {"tokens": tokens, "hidden": hidden, "length": (tokens > 0).double().mean(1)}


class Mix(nn.Module):
    """A dict in, a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: dict[str, Any]) -> tuple[Tensor, ...]:
        hidden = x["hidden"] + torch.tanh(self.linear(self.norm(x["hidden"])))
        return hidden, hidden.mean(1, keepdim=True), x["length"], x["tokens"]


class Scale(nn.Module):
    """Has no parameters, and leaves one of what it gets unused."""

    def forward(self, x: tuple[Tensor, ...]) -> Text:
        hidden, _, length, tokens = x
        return Text(hidden * length[:, None, None], length, tokens)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Text) -> list[Any]:
        first, second = self.linear(x.hidden).chunk(2, dim=-1)
        return [first, {"other": second, "again": first}, x.tokens]


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WORDS)

    def forward(self, x: list[Any]) -> Tensor:
        first, rest, tokens = x
        hidden = (first + rest["other"] * rest["again"]).masked_fill((tokens == 1)[..., None], 0.0)
        return self.linear(hidden)


def make(frozen: tuple[int, ...] = ()) -> nn.Sequential:
    torch.manual_seed(5)
    model = nn.Sequential(Embed(), Mix(), Scale(), Split(), Head()).double()
    for layer in frozen:
        model[layer].requires_grad_(False)
    return model


def make_batches() -> list[tuple[Tensor, Tensor]]:
    """Texts of varying length, and a smaller last batch."""
    generator = torch.Generator().manual_seed(2)
    sizes = [(6, 5), (6, 3), (6, 8), (5, 2)]
    tokens = [torch.randint(0, WORDS, size, generator=generator) for size in sizes]
    return [(t, t.roll(-1, dims=1)) for t in tokens]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss_of(model(batch[0]), batch[1])


PARTITIONS = {
    "1f1b": (2, 3),
    "zbv": (1, 1, 1, 2),
    "pipedream": (2, 1, 2),
    "pipedream_2bw": (2, 1, 2),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return make_optimizer("sgd", parameters)


@pytest.mark.parametrize("frozen", [(), (0, 1), (3, 4)], ids=["none", "first", "last"])
@pytest.mark.parametrize("schedule", PARTITIONS)
def test_trees_lengths_and_frozen_layers(schedule: str, frozen: tuple[int, ...]) -> None:
    partition = PARTITIONS[schedule]
    num_ranks = 3 if "pipedream" in schedule else 2
    shapes = shapes_of(schedule, 1 if schedule == "pipedream" else 3, partition, num_ranks)
    check_equal_late(lambda: make(frozen), shapes, sgd)


def check_equal_late(
    make: Callable[[], nn.Sequential],
    shapes: list[PipelineShape],
    optimize: Callable[[Any], torch.optim.Optimizer],
) -> None:
    ranks = run_ranks(make, shapes, train_with(optimize, make_batches(), step))
    expected = make()
    partition = shapes[0].layers_per_stage
    delays = [Rounds(shape).delay for shape in shapes]

    def staleness(name: str) -> int:
        layer = int(name.partition(".")[0])
        stage = next(s for s in range(len(partition)) if layer < sum(partition[: s + 1]))
        return delays[shapes[0].rank_of_stage[stage]]

    train_late(
        expected,
        optimize([p for p in expected.parameters() if p.requires_grad]),
        make_batches(),
        loss_of,
        drains=(),
        staleness=staleness,
    )
    found = {name: value for state in ranks for name, value in state.items()}
    for name, value in expected.named_parameters():
        torch.testing.assert_close(found[name], value.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("schedule", PARTITIONS)
def test_sparse_gradients(schedule: str) -> None:
    def make_sparse() -> nn.Sequential:
        torch.manual_seed(5)
        tokens = nn.Embedding(WORDS, WIDTH, sparse=True)
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(tokens, *blocks, nn.Linear(WIDTH, WORDS)).double()

    def plain_sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # weight decay takes no sparse gradients

    num_ranks = 3 if "pipedream" in schedule else 2
    count = 1 if schedule == "pipedream" else 3
    check_equal_late(
        make_sparse, shapes_of(schedule, count, PARTITIONS[schedule], num_ranks), plain_sgd
    )


@pytest.mark.parametrize("frozen", [(), (0, 1)], ids=["trained", "frozen"])
def test_no_gradients_travel_to_where_nothing_is_trained(
    frozen: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    send = MemoryChannel.send

    def counted(channel: MemoryChannel, tree: Any, **options: Any) -> None:
        if isinstance(tree, WeightedGradients):
            sent.append(len(tensors_in(tree)))
        send(channel, tree, **options)

    monkeypatch.setattr(MemoryChannel, "send", counted)
    run_ranks(
        lambda: make(frozen), shapes_of("1f1b", 2, (2, 3)), train_with(sgd, make_batches(), step)
    )
    # Of what the second layer hands on, only the hidden states are both trained and used.
    assert set(sent) == {0 if frozen else 1}
    assert len(sent) == 2 * len(make_batches())
