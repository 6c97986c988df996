from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist.engine.parallelize.clip_grad import clip_grad_norm_
from lightning_dist.strategies.base.clipping import clip_whole_gradient


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_copy_that_another_rank_counts_is_left_out() -> None:
    own, copy = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    own.grad, copy.grad = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 12.0])
    both = [own, copy]
    assert float(clip_grad_norm_(both, 1e9)) == pytest.approx((25 + 169) ** 0.5)
    assert float(clip_grad_norm_(both, 1e9, exclude=both)) == 0
    assert float(clip_grad_norm_(both, 2.5, exclude=[copy])) == 5
    torch.testing.assert_close(own.grad, torch.tensor([1.5, 2.0]))
    torch.testing.assert_close(copy.grad, torch.tensor([2.5, 6.0]))


def test_a_norm_that_is_known_is_not_computed() -> None:
    own = nn.Parameter(torch.zeros(2))
    own.grad = torch.tensor([3.0, 4.0])
    assert float(clip_grad_norm_([own], 5.0, total_norm=torch.tensor(10.0))) == 10
    torch.testing.assert_close(own.grad, torch.tensor([1.5, 2.0]))


def test_values_are_clipped_whether_they_are_spread_or_not(mesh: DeviceMesh) -> None:
    sharded = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False))
    plain = nn.Parameter(torch.zeros(2))
    far = torch.tensor([-3.0, 0.5])
    sharded.grad = DTensor.from_local(far.clone(), mesh, [Shard(0)], run_check=False)
    plain.grad = far.clone()
    precision = Precision()
    optimizer = torch.optim.SGD([sharded, plain, nn.Parameter(torch.zeros(1))], lr=1.0)
    undo = clip_whole_gradient(precision, clip_grad_norm_)
    precision.clip_gradients(optimizer, 1.0, GradClipAlgorithmType.VALUE)
    assert sharded.grad.to_local().tolist() == plain.grad.tolist() == [-1.0, 0.5]
    undo()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        precision.clip_gradients(optimizer, 1.0, GradClipAlgorithmType.VALUE)
