"""Layers change their rank between two batches, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.checkpoint.optimizer_state import name_groups, regroup
from lightning_dist.engine.comms.links import ChannelEnds
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.rebalance.relocation import LayerExchange
from lightning_dist.engine.splitting.layers import LayerSequence
from lightning_dist.engine.splitting.remote_layer import RemoteLayer
from tests.helpers.networks.models import make_data, make_layers, make_optimizer
from tests.helpers.processes.threads import Train, Yielding, run_ranks, shapes_of

BATCHES = list(make_data(24).tensors[0].split(8))
TARGETS = list(make_data(24).tensors[1].split(8))
NAMES = [n for n, _ in make_layers(3).named_parameters()]


def make() -> nn.Sequential:
    torch.manual_seed(3)
    model = make_layers(3).double()
    for name, parameter in model.named_parameters():
        parameter.its_name = name  # type: ignore[attr-defined]
        parameter.register_hook(lambda gradient: gradient * 0.5)
        parameter.register_post_accumulate_grad_hook(shrink)
    return model


def shrink(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


class Exchange(LayerExchange):
    """Sends layers between threads."""

    def __init__(self, rank: int, channels: dict[tuple[int, int], Yielding]) -> None:
        super().__init__((), cast(Any, ()), torch.device("cpu"), 0.0)
        self._rank, self._channels = rank, channels

    @override
    def _connect(self, targets: Sequence[int], sources: Sequence[int]) -> ChannelEnds[int]:
        return ChannelEnds(
            {peer: self._channels[self._rank, peer] for peer in targets},
            {peer: self._channels[peer, self._rank] for peer in sources},
        )


def train_moving(cuts: list[tuple[int, ...]], optimizer_name: str, turn: Lock) -> Train:
    """Trains on a batch per cut."""
    channels = {(a, b): Yielding(turn) for a in range(2) for b in range(2)}

    def train(model: nn.Sequential, pipeline: Pipeline) -> dict[str, Tensor]:
        rank = pipeline.shape.rank
        optimizer = make_optimizer(optimizer_name, list(model.parameters()))
        layers = LayerSequence(model)

        def update() -> None:
            pipeline.install_gradients()
            with pipeline.updating():
                optimizer.step()
            optimizer.zero_grad()

        def cut_anew(after: tuple[int, ...]) -> None:
            exchange = Exchange(rank, channels)
            exchange.run(
                pipeline, layers, after, [optimizer], with_gradients=False, on_moved=lambda: None
            )
            regroup(optimizer, model, [NAMES])
            here = {id(p) for p in model.parameters()}
            assert {id(p) for p in optimizer.state} <= here
            assert len(optimizer.param_groups[0]["params"]) == len(here)

        for cut, x, y in zip(cuts, BATCHES, TARGETS, strict=True):
            if cut != pipeline.shape.layers_per_stage:
                cut_anew(cut)
            pipeline.train_batch(
                (x, y), lambda m: F.cross_entropy(model(m.content[0]), m.content[1])
            )
            if pipeline.has_gradients:
                update()
            for _ in pipeline.drain():
                update()
        assert [isinstance(layer, RemoteLayer) for layer in model] == [
            stage not in pipeline.stages
            for stage, count in enumerate(cuts[-1])
            for _ in range(count)
        ]
        assert all(vars(p) == {"its_name": name} for name, p in model.named_parameters())
        return {name: value.clone() for name, value in model.state_dict().items()}

    return train


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("schedule", "count", "cuts"),
    [
        ("1f1b", 2, [(4, 1), (1, 4), (3, 2)]),
        ("pipedream", 1, [(1, 4), (4, 1), (2, 3)]),
        ("zbv", 3, [(1, 1, 1, 2), (2, 1, 1, 1), (1, 2, 1, 1)]),
    ],
)
def test_moves_change_nothing_where_each_batch_is_drained(
    schedule: str, count: int, cuts: list[tuple[int, ...]], optimizer: str
) -> None:
    def states(of_batches: list[tuple[int, ...]]) -> dict[str, Tensor]:
        shapes = shapes_of(schedule, count, of_batches[0])
        turn = Lock()
        train = train_moving(of_batches, optimizer, turn)
        ranks: list[dict[str, Tensor]] = run_ranks(make, shapes, train, turn)
        assert not ranks[0].keys() & ranks[1].keys()
        return ranks[0] | ranks[1]

    moved, stayed = states(cuts), states([cuts[0]] * 3)
    assert moved.keys() == stayed.keys() == make().state_dict().keys()
    for name, value in moved.items():
        assert torch.equal(value, stayed[name]), name


def test_groups_follow_in_the_order_in_which_they_were_made() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in ("a", "b", "c")})
    groups: list[dict[str, Any]] = [
        {"params": [model["c"].weight, model["a"].weight], "lr": 0.5},
        {"params": [model["b"].bias, model["b"].weight]},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    names = name_groups(optimizer, model)
    schedulers: Callable[[], float] = lambda: optimizer.param_groups[0]["lr"]  # noqa: E731
    optimizer.param_groups[0]["lr"] = 0.25
    model["c"] = nn.Linear(2, 2)
    del model["b"]
    regroup(optimizer, model, names)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [
        id(model["c"].weight),
        id(model["a"].weight),
    ]
    assert optimizer.param_groups[1]["params"] == []
    assert schedulers() == 0.25
