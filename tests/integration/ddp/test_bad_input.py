"""Bad input is a ValueError on each rank, before anything hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import DDPStrategy
from tests.helpers.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.workers import WorkerPool


class Idle(Classifier):
    """Has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class Uneven(Classifier):
    """Has another layer on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2 + int(os.environ["RANK"]))


class OtherOrder(Classifier):
    """Has the same layers on each rank, but not in the same order."""

    def __init__(self) -> None:
        super().__init__()
        for name in ["one", "two"][:: 1 - 2 * int(os.environ["RANK"])]:
            self.add_module(name, nn.Linear(2, 2))


class OtherFrozen(Classifier):
    """Has a layer that is frozen on the second rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].linear.requires_grad_(os.environ["RANK"] == "0")


class OtherBuffers(Classifier):
    """Has a buffer of its own on each rank, or none, besides one that both have."""

    own: tuple[Tensor | None, Tensor | None]

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", self.own[int(os.environ["RANK"])], persistent=False)
        self.register_buffer("common", torch.zeros(2))


class MissingBuffer(OtherBuffers):
    own = (torch.zeros(2), None)


class LargerBuffer(OtherBuffers):
    own = (torch.zeros(2), torch.zeros(4))


class WiderBuffer(OtherBuffers):
    own = (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))


class Wrapped(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Fake(self.model))


class Fake(DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


def attempt(module: Any, per_rank: bool, options: dict[str, Any]) -> tuple[str, str, float]:
    start = time.monotonic()
    size = 32 + 8 * int(os.environ["RANK"]) * per_rank
    try:
        trainer = make_trainer(devices=2, strategy=DDPStrategy(**options))
        trainer.fit(make_module(module), make_loader(size), make_loader(8))
    except BaseException as error:
        return type(error).__name__, str(error).splitlines()[0], time.monotonic() - start
    return "nothing", "", time.monotonic() - start


@pytest.mark.parametrize(
    ("module", "per_rank", "message"),
    [
        (Idle, False, r"does not depend on \['spare.weight', 'spare.bias'\].*find_unused"),
        (Uneven, False, r"'extra.weight' is \(2, 2\).* on rank 0 and \(3, 2\).* on rank 1"),
        (
            OtherOrder,
            False,
            "number 38 is 'one.weight' on rank 0 and 'two.weight' on rank 1",
        ),
        (OtherFrozen, False, "'model.0.linear.weight' is .*=True on rank 0 and .*=False on rank 1"),
        (MissingBuffer, False, r"buffer 'steps' is \(2,\).* on rank 0 and missing on rank 1"),
        (LargerBuffer, False, r"buffer 'steps' is \(2,\).* on rank 0 and \(4,\).* on rank 1"),
        (WiderBuffer, False, "buffer 'steps' is .*int32 on rank 0 and .*int64 on rank 1"),
        (Wrapped, False, r"'model.0' is wrapped in Fake"),
        (Classifier, True, r"The ranks have \[4, 5\] training batches"),
    ],
)
def test_is_refused_on_each_rank(
    workers: WorkerPool, module: Any, per_rank: bool, message: str
) -> None:
    answers = workers.run(2, attempt, module, per_rank, {})
    for kind, text, seconds in answers:
        assert kind == "ValueError", (kind, text)
        assert seconds < 10
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)


def test_unused_parameters_are_fine_when_told(workers: WorkerPool) -> None:
    answers = workers.run(2, attempt, Idle, False, {"find_unused_parameters": True})
    assert [kind for kind, *_ in answers] == ["nothing"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "zip"}, "zip.*powersgd"),
        ({"powersgd_rank": 0}, "powersgd_rank=0"),
        ({"powersgd_start_step": 1}, "powersgd_start_step=1.*at least 2"),
        ({"bucket_megabytes": 0}, "bucket_megabytes=0"),
        ({"start_method": "fork"}, "fork.*popen"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPStrategy(**arguments)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        for x, y in (batch, [t.flip(0) for t in batch]):
            optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            self.manual_backward(loss)
            optimizer.step()
        return loss


def fit_manually(devices: int) -> list[Tensor]:
    module = make_module(Manual)
    strategy: Any = DDPStrategy() if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, use_distributed_sampler=False)
    # Both ranks read the same, so that the average is what one device has.
    trainer.fit(module, make_loader(32), make_loader(8))
    return [p.detach().clone() for p in module.parameters()]


def test_manual_optimization(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit_manually(1)
    for found in workers.run(2, fit_manually, 2):
        for one, other in zip(found, expected, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=1e-12)
