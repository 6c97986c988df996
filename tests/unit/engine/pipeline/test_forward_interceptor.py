from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stage import ForwardInterceptor
from lightning_dist.engine.splitting.layers import LayerSequence
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with


def intercept(net: nn.Sequential, outside: Callable[..., Any] | None = None) -> ForwardInterceptor:
    return ForwardInterceptor(LayerSequence(net), outside)


def double(x: Any) -> Any:
    return 2 * x


def test_a_step_runs_what_it_is_given_and_goes_on_or_leaves() -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net)
    assert interceptor.run(lambda: net(3) + 1, double, leaves=False) == 7
    assert interceptor.run(lambda: net(3) + 1, double, leaves=True) == 6
    assert interceptor.run(lambda: net(3), lambda _: None, leaves=True) is None
    interceptor.detach()
    assert net(3) == 3


@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_a_step_cannot_catch_its_own_end(kind: type[BaseException]) -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net)

    def step() -> int:
        try:
            net(3)
        except kind:
            return -1
        return 0

    assert interceptor.run(step, double, leaves=True) == 6


def test_a_module_that_is_not_called_once_is_refused() -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net, lambda x, by: f"{x} by {by}")
    with pytest.raises(ValueError, match="without a call"):
        interceptor.run(lambda: 1, double, leaves=False)
    with pytest.raises(ValueError, match="more than once"):
        interceptor.run(lambda: net(net(1)), double, leaves=False)
    assert net(1, by=2) == "1 by 2"  # outside of a step


def test_an_error_leaves_nothing_behind() -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net)
    with pytest.raises(KeyError):
        interceptor.run(lambda: {}[net(1)], double, leaves=False)
    assert torch.equal(net(torch.ones(2)), torch.ones(2))
    assert interceptor.run(lambda: net(1), double, leaves=False) == 2


# --- steps that change their batch ----------------------------------------------------------------

BATCHES = [
    {"x": torch.linspace(-1, 1, 24).reshape(8, 3).double() * k, "y": torch.ones(8, 3).double() / k}
    for k in (1, 2, 3)
]
make_optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (layer for _ in range(4) for layer in (nn.Linear(3, 3), nn.Tanh()))
    return nn.Sequential(*layers).double()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Takes the targets out of the batch, and writes into the inputs."""
    targets = batch.pop("y").mul_(0.5)
    predicted = model(batch["x"].add_(1.0))
    return (predicted - targets - batch["x"]).square().mean()


def train_on_copies(model: nn.Sequential, pipeline: Pipeline) -> dict[str, Tensor]:
    return train_with(make_optimizer, deepcopy(BATCHES), loss_of)(model, pipeline)


@pytest.mark.parametrize("schedule", ["zbv", "interleaved_1f1b", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_a_step_may_change_its_batch(schedule: str, num_microbatches: int) -> None:
    alone = make_model()
    optimizer = make_optimizer(alone.parameters())
    for batch in deepcopy(BATCHES):
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        optimizer.step()
    partition = (4, 4) if schedule == "1f1b" else (2, 2, 2, 2)
    count = 2 * num_microbatches if schedule == "interleaved_1f1b" else num_microbatches
    states = run_ranks(make_model, shapes_of(schedule, count, partition), train_on_copies)
    found = {name: value for state in states for name, value in state.items()}
    for name, expected in alone.state_dict().items():
        assert float((found[name] - expected).abs().max()) < 1e-12, name


def test_both_ends_know_the_same_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the batch as it was before the step, point to point too."""
    sent: dict[Any, list[Any]] = {}
    received: dict[Any, list[Any]] = {}
    send, receive = MemoryChannel.send, MemoryChannel.receive

    def noted_send(self: MemoryChannel, tree: Any, *, tag: int = 0, key: Any = None) -> None:
        sent.setdefault((id(self), tag), []).append(key)
        send(self, tree, tag=tag, key=key)

    def noted_receive(self: MemoryChannel, *, tag: int = 0, key: Any = None) -> Any:
        received.setdefault((id(self), tag), []).append(key)
        return receive(self, tag=tag, key=key)

    monkeypatch.setattr(MemoryChannel, "send", noted_send)
    monkeypatch.setattr(MemoryChannel, "receive", noted_receive)
    run_ranks(make_model, shapes_of("1f1b", 2, (4, 4)), train_on_copies)
    assert sent == received
    assert any(key is not None for keys in sent.values() for key in keys)
