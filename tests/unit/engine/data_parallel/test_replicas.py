"""Tensors travel on the device of their group, and the host reads none of them.

The device has no values here: reading one fails.
"""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.data_parallel.local_sgd import LocalSGD
from lightning_dist.engine.data_parallel.replicas import (
    PendingAverage,
    average,
    average_gradients,
    average_used,
    broadcast_state,
    differing,
)

META = torch.device("meta")
REPLICAS = DeviceGroup(dist.ProcessGroup(0, 2), META)


def test_gradients_and_weights_are_averaged_on_the_device(sent: list[Tensor]) -> None:
    average([torch.zeros(2, device=META), torch.zeros(3, 2, device=META)], REPLICAS)
    local = LocalSGD(nn.Linear(2, 2, device=META), REPLICAS, LocalConfig())
    local.count_step()
    assert [(tensor.device, tensor.numel()) for tensor in sent] == [(META, 8), (META, 6)]


def test_tensors_without_elements_are_averaged_with_others(sent: list[Tensor]) -> None:
    empty = [torch.zeros(0, dtype=dtype, device=META) for dtype in (torch.float32, torch.float64)]
    average([empty[0], torch.zeros(2, device=META), empty[1]], REPLICAS)
    assert [(tensor.dtype, tensor.numel()) for tensor in sent] == [
        (torch.float32, 2),
        (torch.float64, 0),
    ]


def test_only_a_replica_that_lacks_a_gradient_reads_who_has_one(sent: list[Tensor]) -> None:
    parameters = [nn.Parameter(torch.zeros(size, device=META)) for size in (2, 3)]
    gradients = [torch.zeros_like(parameter) for parameter in parameters]
    average_used(gradients, parameters, REPLICAS)
    with pytest.raises(NotImplementedError, match="meta"):
        average_used([gradients[0], None], parameters, REPLICAS)
    assert [tensor.numel() for tensor in sent] == [2 + 3 + 2] * 2  # a number for each parameter


def test_gradients_are_sent_in_the_dtype_that_is_asked_for(sent: list[Tensor]) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), 3.0)
    average_gradients([parameter], DeviceGroup(REPLICAS.group, torch.device("cpu")), torch.bfloat16)
    assert [tensor.dtype for tensor in sent] == [torch.bfloat16]
    assert torch.equal(parameter.grad, torch.full((2,), 1.5))  # nothing comes from the other one


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64], ids=str)
def test_values_at_other_places_differ(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    first: list[Tensor] = []

    def largest(own: Tensor, op: Any, group: Any) -> None:
        for other in first:
            torch.maximum(own, other, out=own)
        first.append(own.clone())

    monkeypatch.setattr(dist, "all_reduce", largest)
    group = DeviceGroup(REPLICAS.group, torch.device("cpu"))
    mask, same = torch.tensor([0, 1, 0, 0, 1]).to(dtype), torch.ones(3, dtype=dtype)
    differing([mask, same.conj().resolve_conj()], group)  # the first rank
    found = differing([mask.flip(0), same.conj()], group)
    assert len(found) == 1
    assert torch.equal(found[0], mask.flip(0))


@pytest.mark.parametrize("wire", [None, torch.float32, torch.bfloat16])
def test_complex_tensors_keep_their_imaginary_part(
    sent: list[Tensor], wire: torch.dtype | None
) -> None:
    group = DeviceGroup(REPLICAS.group, torch.device("cpu"))
    values = torch.tensor([[2 + 4j, 6 - 8j], [1 + 3j, -5j]])
    real, scalar = torch.tensor([2.0, 4.0]), torch.tensor(4 - 2j)
    tensors = [values.t(), real, scalar, values.clone().conj()]  # the last one is conjugated lazily
    whole = [2 * tensor.resolve_conj().clone() / 4 for tensor in tensors]
    pending = PendingAverage(tensors, group, wire)
    average(tensors, group, wire)
    for found in (tensors, pending.wait()):
        assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in whole]
        for tensor, half in zip(found, whole, strict=True):
            torch.testing.assert_close(tensor.resolve_conj(), half, rtol=0, atol=0)
    assert {tensor.dtype for tensor in sent} == {wire or torch.float32}
    assert sum(tensor.numel() for tensor in sent) == 2 * (8 + 2 + 2 + 8)


def test_two_buckets_at_most_hold_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[Tensor]] = []
    num_held: list[int] = []

    def send(tensor: Tensor, **_: object) -> Any:
        copies.append(weakref.ref(tensor))
        num_held.append(sum(copy() is not None for copy in copies))
        return SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "all_reduce", send)
    tensors = [torch.full((25 * 2**18,), 4.0 + index) for index in range(4)]  # a bucket each
    average(tensors, DeviceGroup(REPLICAS.group, torch.device("cpu")))
    assert num_held == [1, 2, 2, 2]
    assert [t.unique().tolist() for t in tensors] == [[2.0], [2.5], [3.0], [3.5]]


def test_a_state_in_host_memory_is_sent_from_the_device(sent: list[Tensor]) -> None:
    with pytest.raises(NotImplementedError, match="out of meta"):  # it has no values to return
        broadcast_state([torch.zeros(2)], REPLICAS)
    assert [tensor.device for tensor in sent] == [META]
