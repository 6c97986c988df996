"""How units are sharded, on ranks that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchmetrics import MeanMetric

from lightning_dist.engine.sharding import fully_shard as sharding_module
from lightning_dist.engine.sharding.call_hooks import return_no_views
from lightning_dist.engine.sharding.fully_shard import (
    ShardingOptions,
    fill,
    forget_step,
    move_rest,
    reshard,
    shard,
    unshard,
)
from lightning_dist.engine.sharding.wrap import Unit
from lightning_dist.engine.tensors.dtensor import cut, stacked
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_rank(0, 2):
        yield init_device_mesh("cpu", (2,))


class Seen(nn.Module):
    """Notes in which dtype it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes += [x.dtype, self.linear.weight.dtype]
        return self.linear(x)


def make(device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        return nn.Sequential(Seen(), Seen(), nn.Linear(4, 4))


def shard_whole(module: nn.Module, units: list[Unit], mesh: DeviceMesh, **options: Any) -> None:
    shard([module], module, units, mesh, ShardingOptions(**options))


class Scaled(nn.Parameter):
    """A parameter with a scale, as those of a quantised layer have."""

    scale = 1.0


def test_a_parameter_with_attributes_of_its_class_is_refused(mesh: DeviceMesh) -> None:
    module = make()
    module[2].bias = Scaled(torch.zeros(4), requires_grad=False)
    with pytest.raises(ValueError, match=r"^'2\.bias' is a Scaled, which FSDP2 would replace"):
        shard_whole(module, [], mesh)
    assert not any(isinstance(p, DTensor) for p in module.parameters())


def whole_parts(module: nn.Module) -> list[str]:
    """Names what is gathered."""
    named = module.named_parameters()
    return sorted({name.partition(".")[0] for name, p in named if not isinstance(p, DTensor)})


@pytest.mark.parametrize(
    ("asked", "of_a_unit", "whole"),
    [
        (None, None, ["2"]),  # the root
        (True, None, []),
        (False, None, ["0", "1", "2"]),
        (None, False, ["1", "2"]),
        (False, True, ["0", "2"]),
    ],
)
def test_what_stays_whole_behind_a_forward(
    mesh: DeviceMesh, asked: bool | None, of_a_unit: bool | None, whole: list[str]
) -> None:
    module = make()
    units = [Unit("0"), Unit("1", reshard_after_forward=of_a_unit)]
    shard_whole(module, units, mesh, reshard_after_forward=asked)
    assert whole_parts(module) == []
    module(torch.ones(1, 4))
    assert whole_parts(module) == whole
    reshard(module)
    assert whole_parts(module) == []
    unshard(module)
    assert whole_parts(module) == ["0", "1", "2"]


def test_a_unit_may_compute_in_single_precision(mesh: DeviceMesh) -> None:
    module = make()
    shard_whole(module, [Unit("0", keep_fp32=True), Unit("1")], mesh, param_dtype=BF16)
    module(torch.ones(1, 4))
    assert module[0].dtypes == [FP32, FP32]
    assert module[1].dtypes == [BF16, BF16]


def test_what_the_root_is_given_keeps_its_dtype(mesh: DeviceMesh) -> None:
    module = Seen()
    seen: list[torch.dtype] = []
    module.forward = lambda x: seen.append(x.dtype)  # type: ignore[method-assign,assignment]
    shard_whole(module, [], mesh, param_dtype=BF16)
    module(torch.ones(1, 4, dtype=torch.float64))
    assert seen == [torch.float64]


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """In which dtypes gradients are sent."""
    sent: list[torch.dtype] = []
    names = ("reduce_scatter_single", "reduce_scatter_tensor")
    name = next(name for name in names if hasattr(torch.distributed, name))
    original = getattr(torch.distributed, name)

    def note(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(output.dtype)
        return original(output, *args, **kwargs)

    monkeypatch.setattr(torch.distributed, name, note)
    return sent


def test_gradients_travel_in_the_dtype_that_was_asked_for(
    mesh: DeviceMesh, reduced: list[torch.dtype]
) -> None:
    module = make()
    shard_whole(module, [Unit("0"), Unit("1")], mesh, param_dtype=BF16, reduce_dtype=FP32)
    module(torch.ones(1, 4)).sum().backward()
    assert reduced == [FP32] * 3


class Spectral(nn.Module):
    """A layer with a complex weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.float()) * self.weight.sum(0), n=4)


@pytest.mark.parametrize("is_frozen_at_first", [False, True])
def test_complex_gradients_travel_as_they_are(
    mesh: DeviceMesh, reduced: list[torch.dtype], *, is_frozen_at_first: bool
) -> None:
    module = nn.Sequential(Spectral(), nn.Linear(4, 4), Spectral())
    module[1].requires_grad_(False)
    module[2].requires_grad_(not is_frozen_at_first)
    units = [Unit("0"), Unit("1")]  # and the root
    shard_whole(module, units, mesh, param_dtype=BF16, reduce_dtype=FP32)
    module.requires_grad_(True)
    module(torch.ones(1, 4)).sum().backward()
    assert reduced == [FP32, torch.complex64, torch.complex64]  # of the unit 1 first


def test_rows_from_all_over_are_cut_along_the_other_dim() -> None:
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        module = nn.Linear(4, 12, bias=False)
        weight = distribute_tensor(module.weight.detach(), mesh["tp"], [stacked(0, 3)])
        module.weight = nn.Parameter(weight)
        shard_whole(module, [], mesh["dp_shard"])
        assert isinstance(module.weight, DTensor)
        assert module.weight.placements[0] == Shard(1)
        assert module.weight.to_local().shape == (6, 2)


def test_filling_keeps_dtypes_ties_and_what_is_frozen(mesh: DeviceMesh) -> None:
    module = make("meta").to(BF16)
    module[1].linear.weight = module[0].linear.weight
    module[2].bias.requires_grad_(False)
    module.register_buffer("steps", torch.zeros((), dtype=torch.int64, device="meta"))
    names = [*dict(module.named_parameters()), "steps"]
    shard_whole(module, [], mesh)
    shapes = {"weight": (4, 4), "bias": (4,), "steps": ()}
    made: list[str] = []

    def value_of(name: str) -> Tensor:
        made.append(name)
        return torch.ones(shapes[name.rpartition(".")[2]])

    fill(module, names, value_of, torch.device("cpu"))
    assert made == names
    assert module[1].linear.weight is module[0].linear.weight
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert {p.dtype for p in module.parameters()} == {BF16}
    assert module.steps.dtype == torch.int64
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    assert frozen == ["2.bias"]
    assert module[2].weight.to_local().shape == (2, 4)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_leaves_nothing_gathered(mesh: DeviceMesh, where: str) -> None:
    module = make()
    shard_whole(module, [Unit("0"), Unit("1")], mesh, reshard_after_forward=False)

    def fail(*_: Any) -> None:
        raise KeyError

    handle = module[2].register_forward_hook(fail)
    if where == "backward":
        handle.remove()
        handle = module[1].register_full_backward_hook(fail)
    with pytest.raises(KeyError):
        module(torch.ones(1, 4)).sum().backward()
    handle.remove()
    assert whole_parts(module)
    forget_step(module)
    assert whole_parts(module) == []
    module(torch.ones(1, 4)).sum().backward()  # nor does it take itself for a part of that step
    assert whole_parts(module) == []
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize(("offload", "policy"), [(True, CPUOffloadPolicy), (False, OffloadPolicy)])
def test_shards_may_be_kept_in_host_memory(
    mesh: DeviceMesh, offload: bool, policy: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[type] = []

    def note(module: nn.Module, *, offload_policy: Any, **options: Any) -> Any:
        found.append(type(offload_policy))
        return fully_shard(module, offload_policy=offload_policy, **options)

    monkeypatch.setattr(sharding_module, "fully_shard", note)
    shard_whole(make(), [Unit("0")], mesh, offload=offload)
    assert found == [policy] * 2


class WithState(nn.Module):
    """A sharded layer, and beside it what FSDP2 knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean = MeanMetric()
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("scale", torch.ones(4))


def test_what_is_not_sharded_goes_to_the_device(mesh: DeviceMesh) -> None:
    module, device = WithState(), torch.device("meta")
    names = list(dict(module.named_parameters()))
    roots = shard([module.layer], module.layer, [], mesh, ShardingOptions(offload=True))
    before = module.layer.weight
    move_rest(module, roots, device)
    assert module.frozen.device == module.scale.device == device
    assert module.mean.mean_value.device == device
    assert module.layer.weight is before
    assert {p.device.type for p in module.layer.parameters()} == {"cpu"}
    assert list(dict(module.named_parameters())) == names
    module.layer(torch.ones(1, 4)).sum().backward()
    assert module.layer.weight.grad is not None


def test_stacked_matrices_are_sharded_in_equal_parts_or_not_at_all() -> None:
    with fake_rank(0, 4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        layer = nn.Linear(7, 12, bias=False)
        layer.weight = nn.Parameter(cut(layer.weight, mesh["tp"], [stacked(0, 3)]))
        with pytest.raises(ValueError, match=r"'weight' stacks.* 7 input features.* dp_shard=2"):
            shard([layer], layer, [], mesh["dp_shard"], ShardingOptions())


def test_offloaded_shards_are_filled_on_the_host(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[DTensor] = []

    def cpu(tensor: DTensor) -> DTensor:
        moved.append(tensor)
        return tensor

    monkeypatch.setattr(DTensor, "cpu", cpu)
    for offloaded, count in ((False, 0), (True, 2)):
        root = nn.Sequential(nn.Linear(4, 4, device="meta"))
        shard_whole(root, [], mesh, offload=offloaded)
        names = [name for name, _ in root.named_parameters()]
        values = {name: torch.ones(p.shape) for name, p in root.named_parameters()}
        fill(root, names, values.__getitem__, torch.device("cpu"), offloaded=offloaded)
        assert len(moved) == count


def test_a_root_returns_no_views_and_its_other_outputs_as_they_are() -> None:
    """A step may write into logits, of which FSDP2 would lose its hooks."""
    flat = nn.Sequential(nn.Linear(2, 2), nn.Flatten())
    assert flat(torch.ones(2, 2, 2))._is_view()
    return_no_views(flat)
    output = flat(torch.ones(2, 2, 2))
    assert not output._is_view()
    output.mul_(3.0).sum().backward()
    assert torch.equal(flat[0].bias.grad, torch.full((2,), 12.0))
    root = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    return_no_views(root)
    output = root(torch.ones(2, 2))
    output.mul_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
