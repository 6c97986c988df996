"""Bad input is a ValueError on each rank, before anything hangs."""

from __future__ import annotations

import os
import time
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, FSDPStrategy, ParameterServerStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import CaseFailedError, WorkerPool


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


class Scalar(Classifier):
    """Has a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * self.scale


def test_parameters_that_make_no_matrix_are_refused_by_powersgd_only(workers: WorkerPool) -> None:
    for kind, text, _ in workers.run(2, attempt, Scalar, False, {"compression": "powersgd"}):
        assert kind == "ValueError"
        assert "cannot make matrices of ['scale']" in text
    answers = workers.run(2, attempt, Scalar, False, {"compression": "bf16"})
    assert [kind for kind, *_ in answers] == ["nothing"] * 2


def test_unused_parameters_are_fine_when_told(workers: WorkerPool) -> None:
    answers = workers.run(2, attempt, Idle, False, {"find_unused_parameters": True})
    assert [kind for kind, *_ in answers] == ["nothing"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"compression": "zip"}, "zip.*powersgd"),
        ({"powersgd_rank": 0}, "powersgd_rank=0"),
        ({"compression": "powersgd", "find_unused_parameters": True}, "powersgd.*'int8'"),
        ({"powersgd_rank": 1.5}, "powersgd_rank=1.5"),
        ({"sync_every": 2.5}, "sync_every=2.5"),
        ({"bucket_megabytes": float("nan")}, "bucket_megabytes=nan"),
        ({"powersgd_start_step": 1}, "powersgd_start_step=1.*at least 2"),
        ({"bucket_megabytes": 0}, "bucket_megabytes=0"),
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


class Gan(L.LightningModule):
    """Two optimizers in turns, each of which freezes the other one's parameters meanwhile."""

    def __init__(self, toggles: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.toggles = toggles
        self.generator = nn.Linear(4, 12)
        self.critic = nn.Sequential(nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0].flatten(1)
        for optimizer, is_critic in zip(self.optimizers(), (False, True), strict=True):
            if self.toggles:
                self.toggle_optimizer(optimizer)
            made = self.critic(self.generator(real[:, :4]))
            loss = (made - self.critic(real)).mean() if is_critic else -made.mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if self.toggles:
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        parts = (self.generator, self.critic)
        return tuple(torch.optim.Adam(part.parameters(), lr=0.01) for part in parts)


def fit_gan(devices: int, *options: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    module, refused = make_module(Gan), []
    for wrong in options[1:]:
        trainer = make_trainer(devices=devices, strategy=DDPStrategy(**wrong))
        with pytest.raises(ValueError, match="find_unused_parameters=True") as caught:
            trainer.fit(make_module(Gan), make_loader(32))
        refused.append(str(caught.value))
    strategy: Any = DDPStrategy(**options[0]) if devices > 1 else "auto"
    rank = int(os.environ.get("RANK", "0"))
    batches = [x[rank::devices] for x, _ in make_loader(32)]
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, DataLoader([(x,) for x in batches], batch_size=None))
    return state_of(module), refused


def test_optimizers_in_turns(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, _ = fit_gan(1)
    options = [{"find_unused_parameters": True}, {}, {"static_graph": True}]
    for state, (plain, static) in workers.run(2, fit_gan, 2, *options):
        assert all(torch.allclose(state[n], v, 0, 1e-12) for n, v in expected.items())
        assert "frozen ['critic.0.weight'" in plain
        assert "find_unused_parameters=True" in plain
        assert "static_graph=True does not go with 2 optimizers" in static


class Following(Classifier):
    """Lowers its learning rate by a value that gets better on the first rank only."""

    def __init__(self, *, sync: bool) -> None:
        super().__init__()
        self.sync = sync

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        worse = float(self.current_epoch) * (-1 if self.global_rank == 0 else 1)
        self.log("score", worse, sync_dist=self.sync)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": scheduler, "monitor": "score"}]


def follow(strategy: Any, sync: bool) -> float:
    trainer = make_trainer(devices=2, strategy=strategy, max_epochs=3)
    trainer.fit(make_module(Following, sync=sync), make_loader(16), make_loader(16))
    return float(trainer.optimizers[0].param_groups[0]["lr"])


@pytest.mark.parametrize(
    "strategy",
    [DDPStrategy(), FSDPStrategy(), ParameterServerStrategy(num_servers=2)],
    ids=["ddp", "fsdp", "server"],
)
def test_schedulers_follow_the_same_values(workers: WorkerPool, strategy: Any) -> None:
    with pytest.raises(CaseFailedError, match=r"on rank 0, .* with `sync_dist=True`"):
        workers.run(2, follow, strategy, False)
    first, second = workers.run(2, follow, strategy, True)
    assert first == second < 0.1
