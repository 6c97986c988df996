"""Norms stay on the device, and the host reads none of them.

The device has no values here: reading one fails.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.engine.common.device_group import DeviceGroup
from lightning_dist.engine.parallelize.clip_grad import AsyncGradNorm, clip_grad_norm_

META = torch.device("meta")
STAGES = DeviceGroup(dist.ProcessGroup(0, 1), META)


@pytest.mark.parametrize("count", [0, 2])
def test_a_norm_is_summed_and_clipped_by_unread(sent: list[Tensor], count: int) -> None:
    parameters = [nn.Parameter(torch.zeros(3, device=META)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    norms = AsyncGradNorm(STAGES)
    norms.post(0, (p.grad for p in parameters if p.grad is not None))
    clip_grad_norm_(parameters, 1.0, total_norm=norms.of(0))
    assert clip_grad_norm_(parameters, 1.0, pp_group=STAGES).device == META
    assert [(norm.device, norm.dtype) for norm in sent] == [(META, torch.float64)] * 2


def test_gradients_in_host_memory_are_summed_on_the_device(sent: list[Tensor]) -> None:
    """As those of parameters that FSDP offloads."""
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    AsyncGradNorm(STAGES).post(0, [parameter.grad])
    clip_grad_norm_([], 1.0, pp_group=STAGES)
    assert [norm.device for norm in sent] == [META, META]


def test_without_a_group_the_norm_is_where_the_gradients_are() -> None:
    parameter = nn.Parameter(torch.zeros(3, device=META))
    parameter.grad = torch.zeros_like(parameter)
    assert clip_grad_norm_([parameter], 1.0).device == META
    assert clip_grad_norm_([], 1.0).device == torch.device("cpu")


def test_a_sparse_gradient_counts_by_its_elements(sent: list[Tensor]) -> None:
    table = nn.Embedding(5, 2, sparse=True).double()
    table(torch.tensor([1, 1, 3])).square().sum().backward()
    assert table.weight.grad is not None
    norms = AsyncGradNorm(DeviceGroup(dist.ProcessGroup(0, 1), torch.device("cpu")))
    norms.post(0, [table.weight.grad])
    torch.testing.assert_close(norms.of(0), table.weight.grad.to_dense().norm())


def test_a_complex_gradient_is_clipped_by_its_magnitude() -> None:
    whole, real = nn.Parameter(torch.zeros(1, dtype=torch.complex64)), nn.Parameter(torch.zeros(1))
    whole.grad, real.grad = torch.tensor([3 + 4j]), torch.tensor([12.0])
    assert float(clip_grad_norm_([whole, real], 6.5)) == 13
    torch.testing.assert_close(whole.grad, torch.tensor([1.5 + 2j]))
    torch.testing.assert_close(real.grad, torch.tensor([6.0]))
    assert float(clip_grad_norm_([whole], 1.25, total_norm=torch.tensor(2.5))) == 2.5
    torch.testing.assert_close(whole.grad, torch.tensor([0.75 + 1j]))
