from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_dist.engine.tensor_parallel.layers.sharded_logits import ShardedLogits, joined, mark


@pytest.fixture
def apart() -> Iterator[DTensor]:
    """Logits of a single rank, so that apart is whole."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    mesh = init_device_mesh("cpu", (1,))
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    yield mark(DTensor.from_local(logits, mesh, [Shard(1)], run_check=False))
    dist.destroy_process_group()


def test_beside_plain_tensors_they_are_joined(apart: DTensor) -> None:
    other = torch.ones(5, 3)
    with ShardedLogits():
        assert type(apart + other) is torch.Tensor
        assert type(torch.cat([apart, other])) is torch.Tensor
        assert isinstance(apart * 2, DTensor)
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor"):
        _ = apart + other


def test_the_loss_is_a_plain_tensor(apart: DTensor) -> None:
    targets = torch.tensor([0, 1, 2, 0, 1])
    with ShardedLogits():
        loss = F.cross_entropy(apart, targets)
        same = torch.nn.CrossEntropyLoss()(apart, targets)
    assert type(loss) is type(same) is torch.Tensor
    expected = F.cross_entropy(apart.to_local(), targets)
    assert float(loss) == float(same) == pytest.approx(float(expected))


def test_on_the_way_to_the_loss_they_stay_apart(apart: DTensor) -> None:
    with ShardedLogits():
        ways = [
            apart.view(5, 1, 3).flatten(0, 1),
            apart[1:].float(),
            (apart / 2.0).tanh(),
            apart.permute(1, 0),
        ]
        assert all(isinstance(way, DTensor) for way in ways)
        assert apart.shape == (5, 3)


def test_nothing_else_sees_a_part(apart: DTensor) -> None:
    with ShardedLogits():
        joins = [apart.mean(), apart.log_softmax(-1), apart.view(-1), apart[:, [0, 1]], apart[0, 0]]
        assert [type(made) for made in joins] == [torch.Tensor] * len(joins)


def test_what_was_written_to_takes_the_place_of_the_logits(apart: DTensor) -> None:
    with ShardedLogits():
        view = apart.view(5, 1, 3)
        apart.masked_fill_(torch.tensor([True, False, False]), 7.0)
        assert type(apart * 1.0) is torch.Tensor
        assert (apart * 1.0)[:, 0].tolist() == [7.0] * 5
        with pytest.raises(ValueError, match="another view of the same logits"):
            view.sum()


def test_they_are_left_apart_in_a_step_only() -> None:
    mode = ShardedLogits()
    with mode:
        assert mode.is_active
    assert not mode.is_active


def test_a_step_returns_plain_tensors(apart: DTensor) -> None:
    result = joined({"logits": apart, "name": "a"})
    assert type(result["logits"]) is torch.Tensor
    assert result["name"] == "a"


def test_a_loss_with_gradients_in_it_is_refused(apart: DTensor) -> None:
    apart.requires_grad_()
    with ShardedLogits():
        loss = F.cross_entropy(apart, torch.tensor([0, 1, 2, 0, 1]))
        for ask in (
            lambda: torch.autograd.grad(loss, apart, create_graph=True),
            lambda: torch.autograd.grad(loss, apart, None, True, True),
            lambda: loss.backward(None, True, True),
        ):
            with pytest.raises(ValueError, match=r"create_graph=True.*Leave loss_parallel out"):
                ask()
        (slope,) = torch.autograd.grad(loss, apart, None, True)
    assert slope.shape == apart.shape
