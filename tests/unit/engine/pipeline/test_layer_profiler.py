"""What layers cost, on a clock that only they move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist.engine.pipeline.layer_profiler import LayerProfiler
from lightning_dist.engine.pipeline.split_backward import SplitBackward
from lightning_dist.engine.planning.layer_costs import activations_of
from lightning_dist.engine.profiling.meters.memory import ActivationMeter
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind
from lightning_dist.engine.splitting.layers import Part
from lightning_dist.engine.stashing.half_versions import HalfWeights


class ManualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def mark(self) -> float:
        return self.now

    def seconds(self, mark: float) -> float:
        return mark


class Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: ManualClock, seconds: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.clock.now += ctx.seconds
        return gradient, None, None


class Slow(nn.Linear):
    """Takes a given time on the clock, and keeps its input and its output for the backward."""

    def __init__(self, clock: ManualClock, forward_s: float, backward_s: float) -> None:
        super().__init__(4, 4)
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s

    def forward(self, x: Tensor) -> Any:
        self.clock.now += self.forward_s
        return Delay.apply(super().forward(x).sigmoid(), self.clock, self.backward_s)


class Recomputed(Slow):
    def forward(self, x: Tensor) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class Rank:
    """A rank whose stage has some slow layers."""

    def __init__(self, *costs: tuple[float, float], kind: type[Slow] = Slow) -> None:
        self.clock = ManualClock()
        self.recorder = Recorder(0, torch.device("cpu"))
        self.recorder._clock = self.clock
        self.layers = nn.Sequential(*(kind(self.clock, *cost) for cost in costs))
        parts = [Part(f"layer {index}", m, index + 5) for index, m in enumerate(self.layers)]
        self.profiler = LayerProfiler(parts, self.recorder)

    @contextmanager
    def doing(self, kind: ActionKind, index: int, own: float) -> Iterator[None]:
        what = SpanKind.UPDATE if kind is ActionKind.STEP else SpanKind.COMPUTE
        with self.recorder.span(what, Action(2, kind, index)):
            self.clock.now += own
            yield

    def forward(self, index: int = 0) -> Tensor:
        with self.doing(ActionKind.FORWARD, index, 0.25):
            return self.layers(torch.ones(3, 4, requires_grad=True))

    def update(self) -> None:
        with self.doing(ActionKind.STEP, 0, 2.0):
            pass


def test_layers_and_what_is_around_them() -> None:
    rank = Rank((1.0, 3.0), (2.0, 4.0))
    rank.forward()  # nobody watches yet
    rank.profiler.start()
    for index in range(3):
        output = rank.forward(index)
        with rank.doing(ActionKind.BACKWARD, index, 0.5):
            output.sum().backward()
        rank.update()
    with torch.no_grad():
        rank.forward()
    rank.profiler.stop()
    rank.forward()
    found = rank.profiler.profile()
    first, second = found.layers[5], found.layers[6]
    assert (first.name, first.forward_seconds, first.backward_seconds) == ("layer 0", 1.0, 3.0)
    assert (second.forward_seconds, second.backward_seconds) == (2.0, 4.0)
    assert first.boundary_bytes == 3 * 4 * 4
    assert first.parameter_bytes == first.version_bytes == 5 * 4 * 4
    assert first.resident_bytes == 2 * 5 * 4 * 4
    assert first.activation_bytes == 2 * 3 * 4 * 4
    assert found.own_forward_seconds == {2: 0.25}
    assert found.own_backward_seconds == {2: 0.5}
    assert found.update_seconds == 2.0
    assert found.step_seconds == 0.25 + 3.0 + 0.5 + 7.0 + 2.0


def test_an_evaluation_between_two_updates_is_no_part_of_a_step() -> None:
    rank = Rank((1.0, 3.0))
    rank.profiler.start()
    for evaluation in (0.0, 0.0, 100.0, 100.0):
        if evaluation:
            rank.recorder.interrupt()
        rank.clock.now += evaluation
        rank.update()
    assert rank.profiler.profile().step_seconds == 2.0


def test_what_a_backward_runs_again_is_part_of_it() -> None:
    rank = Rank((1.0, 3.0), kind=Recomputed)
    rank.profiler.start()
    output = rank.forward()
    with rank.doing(ActionKind.BACKWARD, 0, 0.0):
        output.sum().backward()
    layer = rank.profiler.profile().layers[5]
    assert layer.forward_seconds == 1.0
    assert layer.backward_seconds == 1.0 + 3.0
    assert layer.activation_bytes == 3 * 4 * 4  # its input


def test_nobody_else_who_counts_misses_what_layers_keep() -> None:
    rank = Rank((1.0, 3.0), (2.0, 4.0))
    alone, beside = (ActivationMeter(rank.layers.parameters()) for _ in range(2))
    with alone:
        first = rank.forward()
    rank.profiler.start()
    with beside:
        second = rank.forward()
    assert alone.num_bytes == beside.num_bytes == 2 * 2 * 3 * 4 * 4
    (first + second).sum().backward()
    layers = rank.profiler.profile().layers.values()
    assert [layer.activation_bytes for layer in layers] == 2 * [2 * 3 * 4 * 4]


def test_what_two_layers_keep_is_shared() -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    parts = [Part(f"{index}", layer, index) for index, layer in enumerate(layers)]
    profiler = LayerProfiler(parts, Recorder(0, torch.device("cpu")))
    profiler.start()
    with ActivationMeter(p.detach() for p in layers.parameters()) as whole:
        layers(torch.ones(3, 4)).sum().backward()
    profiler.stop()
    found = [costs for _, costs in sorted(profiler.profile().layers.items())]
    assert [costs.activation_bytes for costs in found] == 3 * [3 * 4 * 4]
    assert [costs.shared_bytes for costs in found] == [0, 0, 3 * 4 * 4]  # what ReLU returns
    assert activations_of(found) == whole.peak_bytes


def test_layers_in_half_precision_hold_a_version_beside_their_masters() -> None:
    rank = Rank((1.0, 3.0))
    rank.profiler = LayerProfiler(
        [Part("layer", rank.layers[0], 5)], rank.recorder, HalfWeights(lambda _: torch.float16)
    )
    rank.profiler.start()
    half = {n: p.detach().half().requires_grad_() for n, p in rank.layers.named_parameters()}
    torch.func.functional_call(rank.layers, half, (torch.ones(3, 4, dtype=torch.float16),))
    layer = rank.profiler.profile().layers[5]
    assert layer.parameter_bytes == 5 * 4 * 4
    assert layer.version_bytes == 5 * 4 * 2
    assert layer.resident_bytes == 5 * 4 * (4 + 4 + 2)
    assert layer.activation_bytes == 2 * 3 * 4 * 2


def test_a_parted_backward_is_whole() -> None:
    rank = Rank((1.0, 3.0), (1.0, 1.0))
    rank.profiler.start()
    x = torch.ones(3, 4, requires_grad=True)
    with rank.doing(ActionKind.FORWARD, 0, 0.0):
        output = rank.layers(x)
    parameters = dict(rank.layers.named_parameters())
    parted = SplitBackward([output], [torch.ones(3, 4)], [x], parameters)
    with rank.doing(ActionKind.BACKWARD_INPUT, 0, 0.0):
        parted.run_inputs()
    with rank.doing(ActionKind.BACKWARD_WEIGHT, 0, 2.0):
        parted.run_weights()
    layers = rank.profiler.profile().layers
    assert sum(layer.backward_seconds for layer in layers.values()) == pytest.approx(6.0)
    assert layers[5].backward_seconds == pytest.approx(4.5)


def test_a_layer_that_fails_leaves_nothing_behind() -> None:
    rank = Rank((1.0, 3.0))
    rank.profiler.start()
    with pytest.raises(RuntimeError):
        rank.layers(torch.ones(3, 5))
    rank.profiler.stop()
    kept = (torch.ones(2, requires_grad=True) ** 2).grad_fn
    assert kept is not None
    assert kept._saved_self is not None
    assert not rank.layers[0]._forward_hooks
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_a_rank_that_saw_nothing() -> None:
    rank = Rank((1.0, 3.0))
    found = rank.profiler.profile()
    assert found.layers[5].seconds == 0.0
    assert found.update_seconds == 0.0
    assert found.step_seconds != found.step_seconds
