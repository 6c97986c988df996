"""What is counted in a step, on one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.profiling.meters.memory import (
    ActivationMeter,
    WeightsInUse,
    bytes_of,
    gradient_bytes,
    optimizer_bytes,
)
from lightning_dist.engine.profiling.meters.step_counter import StepCounter, num_samples, num_tokens
from lightning_dist.engine.profiling.meters.torch_trace import (
    CollectiveTrace,
    exposure_of,
    part_of_step,
)

ROWS, WIDTH = 16, 32
ACTIVATION_BYTES = ROWS * WIDTH * 4


def layers(count: int) -> nn.Sequential:
    pairs = ((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))
    return nn.Sequential(*(part for pair in pairs for part in pair))


def test_activations_are_counted_until_the_backward_drops_them() -> None:
    model, x = layers(3), torch.randn(ROWS, WIDTH)
    meter = ActivationMeter(model.parameters())
    with meter:
        first = model(x).sum()
        one = meter.num_bytes
        second = model(x).sum()
    # A linear keeps its input, tanh its output, which is the next linear's input: 4 tensors.
    assert one == 4 * ACTIVATION_BYTES
    assert meter.peak_bytes == meter.num_bytes == 2 * one - ACTIVATION_BYTES  # of one input
    first.backward()
    assert meter.num_bytes == one
    second.backward()
    assert meter.num_bytes == 0
    assert meter.peak_bytes == 2 * one - ACTIVATION_BYTES


def test_watching_changes_no_gradient() -> None:
    model, x = layers(2), torch.randn(ROWS, WIDTH)
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    counter = StepCounter(MeshShape(), model.parameters())
    counter.start()
    model(x).sum().backward()
    counter.stop()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    count = counter.count(num_steps=1, num_forwards=1)
    # Forward, and backward of the weights for each; of the inputs for all but the first.
    assert count.flops == 2 * ROWS * WIDTH * WIDTH * (2 + 2 + 1)
    assert count.activation_bytes == count.forward_bytes == 3 * ACTIVATION_BYTES
    assert count.traffic == ()


@pytest.mark.parametrize("compiles_before", [False, True])
def test_what_torch_compiles_stays_compiled(compiles_before: bool) -> None:
    runs: list[str] = []

    def backend(graph: Any, _: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append("compiled")
            return graph(*args)

        return run

    model, x = Compiled(), torch.randn(ROWS, WIDTH)
    model.compile(backend=backend, fullgraph=True)
    if compiles_before:
        model(x).sum().backward()
    counter = StepCounter(MeshShape(), model.parameters())
    counter.start()
    model(x).sum().backward()
    counter.stop()
    assert len(runs) == 2 * compiles_before
    assert counter.count(num_steps=1, num_forwards=1).flops == 2 * ROWS * WIDTH * WIDTH * 2
    runs.clear()
    model(x).sum().backward()
    model(x[:1]).sum().backward()  # another shape, for which there is no code yet
    assert len(runs) == 2


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def test_a_dtensor_counts_by_its_local_part() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.randn(ROWS, WIDTH), mesh, [Shard(0)]).requires_grad_()
        meter = ActivationMeter([])
        with meter:
            x.exp().sum()
        assert meter.peak_bytes == ACTIVATION_BYTES // 2
    finally:
        dist.destroy_process_group()


def test_sparse_and_jagged_tensors_are_counted_by_what_they_are_made_of() -> None:
    rows = torch.nested.nested_tensor(
        [torch.ones(3, WIDTH), torch.ones(1, WIDTH)], layout=torch.jagged
    )
    linear = nn.Linear(WIDTH, WIDTH)
    meter = ActivationMeter(linear.parameters())
    with meter:
        jagged = linear(rows).values().sum()
    assert meter.num_bytes >= rows.values().nbytes
    jagged.backward()
    assert meter.num_bytes == 0
    with meter:
        torch.sparse.mm(torch.eye(4).to_sparse(), linear(torch.ones(4, WIDTH))).sum().backward()
    assert meter.num_bytes == 0


def test_versions_of_weights_are_no_activations() -> None:
    model, x = layers(2), torch.randn(ROWS, WIDTH)
    versions = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    counter = StepCounter(MeshShape(), model.parameters())
    counter.start()
    torch.func.functional_call(model, versions, (x.requires_grad_(),)).sum().backward()
    counter.stop()
    count = counter.count(num_steps=1, num_forwards=1)
    # Both linears keep the weights that their inputs' gradients need.
    assert count.activation_bytes == count.forward_bytes == 3 * ACTIVATION_BYTES
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_bytes_that_are_held() -> None:
    model = layers(2)
    elements = 2 * (WIDTH * WIDTH + WIDTH)
    shared = model[0].weight
    assert bytes_of([*model.parameters(), shared, shared.detach().t()]) == elements * 4
    assert gradient_bytes(model.parameters()) == 0
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert gradient_bytes(model.parameters()) == elements * 4
    optimizer = torch.optim.AdamW(model.parameters())
    assert optimizer_bytes([optimizer]) == 0
    optimizer.step()
    assert optimizer_bytes([optimizer]) == 2 * elements * 4


IMAGES = [torch.zeros(3, 2, 2)] * 4


class Texts(dict[str, Any]):
    """What a collate function gives."""


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (torch.zeros(4, 7), 4, None),
        ([torch.zeros(3, 2), torch.zeros(3)], 3, None),
        ({"input_ids": torch.zeros(4, 7), "y": torch.zeros(4)}, 4, 28),
        (SimpleNamespace(tokens=torch.zeros(2, 5)), 0, 10),
        ("text", 0, None),
        ([torch.zeros(5, 2), torch.zeros(7, 2), torch.zeros(5, 2)], 3, None),
        ((IMAGES, [torch.zeros(1)] * 4), 4, None),
        ((IMAGES, [torch.tensor(1)] * 4), 4, None),
        ((IMAGES, torch.zeros(4)), 4, None),
        ((IMAGES, [{"boxes": torch.zeros(n, 4)} for n in (1, 2, 0, 3)]), 4, None),
        ([torch.zeros(4, 2), torch.tensor(0.5)], 4, None),
        ({"x": torch.zeros(4, 2), "anchors": [torch.zeros(5), torch.zeros(7)]}, 4, None),
        ((torch.zeros(6, 2), torch.zeros(9, 2)), 6, None),
    ],
)
def test_what_a_batch_says(batch: Any, samples: int, tokens: int | None) -> None:
    assert (num_samples(batch), num_tokens(batch)) == (samples, tokens)


def event(name: str, thread: int, start: float, end: float, *, on_device: bool = False) -> Any:
    return SimpleNamespace(
        name=lambda: name,
        start_thread_id=lambda: thread,
        start_ns=lambda: int(start * 1e9),
        end_ns=lambda: int(end * 1e9),
        device_type=lambda: DeviceType.CUDA if on_device else DeviceType.CPU,
        is_user_annotation=lambda: name.startswith("note"),
    )


def test_events_of_a_cpu() -> None:
    events = [
        event("aten::mm", 1, 0.0, 2.0),
        event("gloo:all_reduce", 2, 1.0, 5.0),
        event("aten::copy_", 2, 3.0, 4.0),  # the backend's own
        event("autograd::engine", 1, 0.0, 9.0),
        event("lightning_dist::backward", 1, 0.0, 4.0),
        event("ncclDevKernel_AllReduce_Sum", 3, 0.0, 9.0, on_device=True),
    ]
    exposure = exposure_of(events, on_device=False)
    assert exposure.seconds == pytest.approx(4.0)
    assert exposure.exposed_seconds == pytest.approx(3.0)
    assert exposure.shares == {"backward": pytest.approx(0.5)}


def test_events_of_a_gpu() -> None:
    events = [
        event("aten::mm", 1, 0.0, 9.0),
        event("ampere_sgemm", 7, 0.0, 2.0, on_device=True),
        event("note", 7, 0.0, 9.0, on_device=True),
        event("ncclDevKernel_AllReduce_Sum_f32", 20, 1.0, 5.0, on_device=True),
    ]
    exposure = exposure_of(events, on_device=True)
    assert exposure.seconds == pytest.approx(4.0)
    assert exposure.exposed_seconds == pytest.approx(3.0)


def test_a_real_trace_has_the_parts_that_were_named(capfd: pytest.CaptureFixture[str]) -> None:
    trace, waited = CollectiveTrace(torch.device("cpu")), []
    assert trace.stop() is None
    trace.start(lambda: waited.append(True))
    with part_of_step("forward"):
        result: Tensor = layers(1)(torch.randn(ROWS, WIDTH))
    exposure = trace.stop()
    assert waited == [True]
    assert result.shape == (ROWS, WIDTH)
    assert exposure is not None
    assert exposure.shares == {"forward": 0.0}
    capfd.readouterr()  # torch's profiler says that it begins


def test_parameters_are_followed_to_other_memory() -> None:
    linear = nn.Linear(2, 2)
    before = linear.weight.untyped_storage().data_ptr()
    with WeightsInUse(linear.parameters()) as weights:
        assert before in weights
        kept = linear.weight.data
        linear.weight.data = kept.clone()  # as a pipeline does, between batches
        linear(torch.ones(1, 2))
        assert linear.weight.untyped_storage().data_ptr() in weights
        assert before not in weights
