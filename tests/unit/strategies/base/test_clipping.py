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

from lightning_dist.engine.parallelize.grad_norm import exclude_tied, norm_over
from lightning_dist.strategies.base.clipping import clip_whole_gradient


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_copy_that_another_rank_counts_is_left_out() -> None:
    own, copy = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    own.grad, copy.grad = torch.tensor([3.0, 4.0]), torch.tensor([5.0, 12.0])
    norm = norm_over()
    assert float(norm([[own, copy]])) == pytest.approx((25 + 169) ** 0.5)
    assert float(exclude_tied(lambda: [copy], norm)([[own, copy]])) == 5
    assert float(exclude_tied(lambda: [copy], norm)([[own], [copy]])) == 5
    assert float(exclude_tied(lambda: [own, copy], norm)([[own, copy]])) == 0


def test_values_are_clipped_whether_they_are_spread_or_not(mesh: DeviceMesh) -> None:
    spread = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False))
    plain = nn.Parameter(torch.zeros(2))
    far = torch.tensor([-3.0, 0.5])
    spread.grad = DTensor.from_local(far.clone(), mesh, [Shard(0)], run_check=False)
    plain.grad = far.clone()
    precision = Precision()
    optimizer = torch.optim.SGD([spread, plain, nn.Parameter(torch.zeros(1))], lr=1.0)
    undo = clip_whole_gradient(precision, norm_over())
    precision.clip_gradients(optimizer, 1.0, GradClipAlgorithmType.VALUE)
    assert spread.grad.to_local().tolist() == plain.grad.tolist() == [-1.0, 0.5]
    undo()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        precision.clip_gradients(optimizer, 1.0, GradClipAlgorithmType.VALUE)
