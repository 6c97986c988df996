"""An update of parameters on several meshes is that of plain parameters, and groups stay whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.optim import ASGD, SGD, AdamW, Optimizer

from lightning_dist.engine.parallelize.mixed_tensors import (
    explain_shard_errors,
    note_shard_errors,
    split_groups_by_mesh,
)
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.strategies.mesh_runtime.dry.fake_ranks import fake_rank
from tests.differential.dials.optimizers import CountingTensor, OneEstimate
from tests.helpers.networks.foreach import foreach_by_default

Place = tuple[DeviceMesh, list[Placement]] | None


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_rank(3, 4), foreach_by_default():
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))


def mixtures(mesh: DeviceMesh) -> dict[str, list[Place]]:
    tp, both = (mesh["tp"], [Shard(0)]), (mesh, [Shard(0), Shard(1)])
    return {
        "tensor parallel": [tp, None, tp, None],
        "and shards": [both, (mesh["dp_shard"], [Shard(0)])] * 2,
    }


def sharded(whole: Tensor, place: Place) -> Tensor:
    if place is None:
        return whole.clone()
    return distribute_tensor(whole.clone(), *place, src_data_rank=None)


def values(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(4)]


def set_gradients(parameters: list[nn.Parameter], places: list[Place], step: int) -> None:
    for parameter, place, gradient in zip(parameters, places, values(step), strict=True):
        parameter.grad = sharded(gradient, place)


Make = Callable[[Any], Optimizer]


def train(make: Make, places: list[Place]) -> tuple[list[Tensor], Optimizer]:
    """Trains with a schedule that writes the rate of the second of two groups."""
    pairs = zip(values(0), places, strict=True)
    parameters = [nn.Parameter(sharded(value, place)) for value, place in pairs]
    optimizer = make([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 0.02}])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 1.0, lambda k: 0.5**k])
    for step in range(1, 4):
        set_gradients(parameters, places, step)
        with split_groups_by_mesh(optimizer):
            optimizer.step()
        schedule.step()
    return [parameter.detach() for parameter in parameters], optimizer


def sgd(groups: Any, **way: bool) -> Optimizer:
    return SGD(groups, lr=0.1, momentum=0.9, weight_decay=0.1, **way)


def adamw(groups: Any, **way: bool) -> Optimizer:
    return AdamW(groups, lr=0.1, weight_decay=0.1, **way)


WAYS: list[dict[str, bool]] = [{"foreach": True}, {"fused": True}, {"foreach": False}, {}]


@pytest.mark.parametrize("mixture", ["tensor parallel", "and shards"])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("make", [sgd, adamw])
def test_an_update_equals_that_of_plain_parameters(
    mesh: DeviceMesh, make: Callable[..., Optimizer], way: dict[str, bool], mixture: str
) -> None:
    places = mixtures(mesh)[mixture]
    found, optimizer = train(lambda groups: make(groups, **way), places)
    expected, _ = train(lambda groups: make(groups, foreach=False), [None] * 4)
    for one, other, place in zip(found, expected, places, strict=True):
        torch.testing.assert_close(
            local_part(one), local_part(sharded(other, place)), rtol=0, atol=1e-12
        )
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.02 * 0.5**3]
    assert all({**group, **way} == group for group in optimizer.param_groups)
    assert not optimizer._optimizer_step_pre_hooks


def test_an_operation_that_takes_one_mesh_is_given_one(mesh: DeviceMesh) -> None:
    """Which torch refuses for averaged SGD, all of whose parameters are DTensors."""
    found, _ = train(
        lambda groups: ASGD(groups, lr=0.1, foreach=True), mixtures(mesh)["and shards"]
    )
    assert all(local_part(parameter).isfinite().all() for parameter in found)


def mixed(mesh: DeviceMesh, make: Make) -> tuple[Optimizer, list[nn.Parameter]]:
    places = mixtures(mesh)["tensor parallel"]
    parameters = [nn.Parameter(sharded(v, p)) for v, p in zip(values(0), places, strict=True)]
    set_gradients(parameters, places, 1)
    return make(parameters), parameters


def test_a_closure_finds_the_groups_of_the_user_and_writes_into_them(mesh: DeviceMesh) -> None:
    optimizer, parameters = mixed(mesh, lambda p: SGD(p, lr=0.1, foreach=True))
    (own,), before = optimizer.param_groups, [local_part(p).clone() for p in parameters]

    def closure() -> float:
        assert optimizer.param_groups[0] is own
        assert len(own["params"]) == 4
        own["lr"] = 0.5
        return 7.0

    with split_groups_by_mesh(optimizer):
        assert optimizer.step(closure=closure) == 7.0
        assert optimizer.param_groups == [own]
    for parameter, value in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        moved = local_part(parameter.detach()) - value
        torch.testing.assert_close(moved, -0.5 * local_part(parameter.grad))
    assert optimizer.param_groups == [own]


def test_groups_are_whole_again_after_a_step_that_failed(mesh: DeviceMesh) -> None:
    optimizer, parameters = mixed(mesh, lambda p: SGD(p, lr=0.1, foreach=True, momentum=0.9))
    (own,) = optimizer.param_groups
    optimizer.state[parameters[0]]["momentum_buffer"] = "no tensor"
    with pytest.raises(Exception, match="str"), split_groups_by_mesh(optimizer):
        optimizer.step(closure=lambda: None)
    assert optimizer.param_groups == [own]
    assert own["params"] == parameters


@pytest.mark.parametrize("make", [CountingTensor, OneEstimate])
def test_another_optimizer_has_its_group_whole(mesh: DeviceMesh, make: Any) -> None:
    """Which it may count steps in, or make an estimate from."""
    optimizer, parameters = mixed(mesh, make)
    (own,) = optimizer.param_groups
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    plain = make([nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients])
    for group in (own, plain.param_groups[0]):
        group["foreach"] = True
    for parameter, gradient in zip(plain.param_groups[0]["params"], gradients, strict=True):
        parameter.grad = gradient.clone()
    for each in (plain, optimizer):
        with split_groups_by_mesh(each):
            each.step(closure=lambda: None)
    assert optimizer.param_groups == [own]
    assert own["foreach"]
    for key in ("lr", "d", "step"):
        if key in own:
            assert own[key] == pytest.approx(plain.param_groups[0][key])


ON_A_PART: dict[str, Callable[[Tensor], Tensor]] = {
    "beside a plain tensor": lambda part: part + torch.ones(4, 4),
    "in an operation that knows no shards": lambda part: torch._is_any_true(part > 0),
}


@pytest.mark.parametrize("operation", ON_A_PART)
def test_an_operation_on_a_part_of_a_parameter_is_explained(
    mesh: DeviceMesh, operation: str
) -> None:
    part = sharded(values(0)[0], (mesh["dp_shard"], [Shard(0)]))
    for has_units, advice in ((True, "let `wrap=` name"), (False, "leave that layer out of the")):
        refused = pytest.raises(ValueError, match="each rank has a part only")
        with refused as explained, explain_shard_errors(has_units=has_units):
            ON_A_PART[operation](part)
        assert advice in str(explained.value)
        assert ("wrap=" in str(explained.value)) == has_units
    with pytest.raises(RuntimeError) as caught:
        ON_A_PART[operation](part)
    note_shard_errors(caught.value)
    assert "parameter.full_tensor()" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    "operation",
    [
        Tensor.max,
        Tensor.amax,
        Tensor.argmin,
        lambda part: torch._foreach_norm([part], float("inf")),
        lambda part: torch.linalg.vector_norm(part, float("inf")),
    ],
)
def test_a_part_without_rows_is_explained(operation: Callable[[Tensor], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as caught:
        operation(torch.zeros(0, 3))
    note_shard_errors(caught.value)
    assert "this rank has no row of it" in caught.value.__notes__[0]


def test_a_gradient_by_a_shard_is_explained() -> None:
    x, shard = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    for has_units in (True, False):
        with pytest.raises(RuntimeError) as caught, explain_shard_errors(has_units=has_units):
            torch.autograd.grad(x.sum(), shard)
        notes = getattr(caught.value, "__notes__", [])
        assert any("reshard_after_forward=False" in note for note in notes) == has_units


@pytest.mark.parametrize("error", [ValueError("a step has computed"), RuntimeError("other")])
def test_other_errors_have_no_advice(error: Exception) -> None:
    note_shard_errors(error)
    assert not hasattr(error, "__notes__")
