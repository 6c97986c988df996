"""What hooks write outside of the layers, averages of weights say, is there on all stages."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import CaseFailedError, WorkerPool


class Average(nn.Module):
    """An average of a model's weights in buffers, as latent diffusion models keep it."""

    def __init__(self, model: nn.Module, *, as_buffers: bool) -> None:
        super().__init__()
        for name, parameter in model.named_parameters():
            own = parameter.detach().clone()
            if as_buffers:
                self.register_buffer(name.replace(".", "_"), own)
            else:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(own, False))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            average = getattr(self, name.replace(".", "_"))
            # Of what is written into `.data`, torch keeps no count.
            written = average.data if isinstance(average, nn.Parameter) else average
            written.mul_(0.9).add_(parameter, alpha=0.1)


class Averaging(Classifier):
    def __init__(self, *, as_buffers: bool) -> None:
        super().__init__()
        self.average = Average(self.model, as_buffers=as_buffers)
        self.register_buffer("batches", torch.zeros(()))
        self.seen: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update(self.model)
        self.batches += 1

    def on_validation_start(self) -> None:
        tensors = self.average.state_dict().values()
        self.seen.append(float(sum(tensor.square().sum() for tensor in tensors)))


def average(strategy: Any, as_buffers: bool, path: str) -> tuple[list[float], dict[str, Tensor]]:
    trainer = make_trainer(devices=2 if strategy else 1, strategy=strategy or "auto", max_epochs=2)
    module = make_module(Averaging, as_buffers=as_buffers)
    trainer.fit(module, make_loader(16), make_loader(8))
    trainer.save_checkpoint(path)
    own = {"batches": module.batches, **module.average.state_dict()}
    saved = load_full(path)["state_dict"] if trainer.is_global_zero else {}
    return module.seen, {**own, **{n: t for n, t in saved.items() if n.startswith("average")}}


@pytest.mark.some("stages-frozen")
@pytest.mark.parametrize("as_buffers", [True, False], ids=["buffers", "frozen"])
@pytest.mark.parametrize(
    "strategy", [PipelineStrategy(), MeshStrategy(pp=2, save_full=True)], ids=["stages", "mesh"]
)
def test_averages_that_hooks_keep_are_whole(
    workers: WorkerPool, tmp_path: Path, strategy: Any, as_buffers: bool
) -> None:
    ((seen, expected),) = workers.run(1, average, None, as_buffers, str(tmp_path / "one"))
    for own_seen, found in workers.run(2, average, strategy, as_buffers, str(tmp_path / "two")):
        assert own_seen == pytest.approx(seen, rel=1e-12)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-14)


class Following(Classifier):
    """Has a teacher that follows after each batch, paired by name or by order."""

    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), *(nn.Linear(12, 12) for _ in range(4)))
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)
        self.by_name = by_name

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        followers = dict(self.teacher.named_parameters())
        pairs = list(zip(followers.values(), self.model.parameters(), strict=False))
        if self.by_name:
            pairs = [(followers[name], p) for name, p in self.model.named_parameters()]
        for follower, parameter in pairs:
            follower.data.lerp_(parameter.data, 0.1)


def follow(devices: int, by_name: bool) -> list[Tensor]:
    strategy: Any = PipelineStrategy() if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=1)
    module = make_module(Following, by_name=by_name)
    trainer.fit(module, make_loader(16), make_loader(8))
    return [p.clone() for p in module.teacher.parameters()]


def test_a_teacher_follows_by_name_and_not_by_order(workers: WorkerPool) -> None:
    ((*expected,),) = workers.run(1, follow, 1, True)
    for found in workers.run(2, follow, 2, True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(CaseFailedError, match=r"into 'teacher\.1\.bias' on stages"):
        workers.run(2, follow, 2, False)


class Taught(Following):
    """Learns from its teacher in each step, and sets it at the start."""

    def __init__(self, each_epoch: bool) -> None:
        super().__init__(by_name=True)
        self.each_epoch = each_epoch

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.each_epoch:
            super().on_train_batch_end(*args)

    def on_train_epoch_end(self) -> None:
        if self.each_epoch:
            super().on_train_batch_end()

    @torch.no_grad()
    def on_fit_start(self) -> None:
        followers = dict(self.teacher.named_parameters())
        for name, parameter in self.model.named_parameters():
            followers[name].data = parameter.data * 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        taught = self.teacher(batch[0].flip(-1))
        return F.mse_loss(self.model(batch[0]), taught)


def learn(devices: int, options: dict[str, Any], each_epoch: bool = False) -> dict[str, Tensor]:
    strategy: Any = PipelineStrategy(**options) if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=3)
    module = make_module(Taught, each_epoch=each_epoch)
    trainer.fit(module, make_loader(32), make_loader(8))
    return state_of(module)


@pytest.mark.some("1f1b-True")
@pytest.mark.parametrize(
    ("schedule", "each_epoch"), [("1f1b", False), ("zbv", False), ("1f1b", True)]
)
def test_a_step_sees_the_latest_teacher(
    workers: WorkerPool, schedule: str, each_epoch: bool
) -> None:
    (expected,) = workers.run(1, learn, 1, {}, each_epoch)
    ranks = workers.run(2, learn, 2, {"schedule": schedule}, each_epoch)
    found = {name: value for rank in ranks for name, value in rank.items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    for name, value in ranks[0].items():  # each rank has the teacher of all
        assert torch.equal(value, found[name])


def learn_late() -> str:
    try:
        learn(2, {"schedule": "pipedream"})
    except ValueError as error:
        return str(error)
    return "nothing"


def test_stages_that_do_not_wait_have_no_such_teacher(workers: WorkerPool) -> None:
    for text in workers.run(2, learn_late):
        assert text.startswith("Training steps use teacher.1.bias, teacher.1.weight, ")
        assert "Use a synchronous one" in text
