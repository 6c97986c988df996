"""What steps and optimizers cannot do on stages is refused, with the cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_dist import PipelineStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Quasi(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class NormedSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 1.0)
        super().step()
        return loss


class Normed(Classifier):
    def configure_optimizers(self) -> Any:
        return NormedSGD(self.parameters(), lr=0.1)


class Memorising(Classifier):
    """Uses what the last step's output was, as a Transformer-XL does."""

    memory: Any = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.model(batch[0] + self.memory)
        self.memory = output.detach().mean()
        return F.cross_entropy(output, batch[1])


class Decaying(Classifier):
    """Changes a number in each run of a step."""

    noise = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.noise *= 0.9
        return F.cross_entropy(self.model(batch[0] + self.noise), batch[1])


class TwiceSGD(torch.optim.SGD):
    """Evaluates a batch again behind a first step, as SAM does."""

    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
        super().step()
        return super().step(closure)


class EvaluatingTwice(Classifier):
    def configure_optimizers(self) -> Any:
        return TwiceSGD(self.parameters(), lr=0.1)


class SettingRates(Classifier):
    """Sets the learning rate for an update that is an earlier batch's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.02 * (self.global_step + 1)
        return super().training_step(batch, batch_idx)


class UpdatesTwice(Classifier):
    """Takes two steps by one gradient."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.step()


KINDS = {
    "no closure": UpdatesTwice,
    "LBFGS": Quasi,
    "norm": Normed,
    "memory": Memorising,
    "changes": Decaying,
    "closure": EvaluatingTwice,
    "rates": SettingRates,
}
SCHEDULES = {
    "changes": "zbv",
    "closure": "pipedream",
    "no closure": "pipedream",
    "rates": "pipedream",
}


def refused(kind: str) -> tuple[str, str]:
    module = make_module(KINDS.get(kind, Classifier))
    callbacks = [EMAWeightAveraging()] if kind == "EMA" else []
    try:
        strategy = PipelineStrategy(schedule=SCHEDULES.get(kind, "1f1b"))
        trainer = make_trainer(devices=2, strategy=strategy, callbacks=callbacks)
        trainer.fit(module, make_loader(), make_loader(8))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("EMA", "EMAWeightAveraging"),
        ("LBFGS", "LBFGS"),
        ("norm", "by the gradients of others"),
        ("memory", "keep nothing of a step for the next"),
        ("closure", "has called its closure twice"),
        ("no closure", "has stepped without its closure"),
        ("changes", "in hooks such as `on_train_batch_start`"),
        ("rates", "has changed ['lr'] of the optimizer's parameter groups"),
    ],
)
def test_what_cannot_be_done_is_refused(workers: WorkerPool, kind: str, message: str) -> None:
    for error, text in workers.run(2, refused, kind):
        assert error == "ValueError", (error, text)
        assert message in text


def update_twice(schedule: str, devices: int) -> dict[str, Tensor]:
    module = make_module(UpdatesTwice)
    strategy: Any = PipelineStrategy(schedule=schedule) if devices > 1 else "auto"
    make_trainer(devices=devices, strategy=strategy).fit(module, make_loader(), make_loader(8))
    return state_of(module)


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_synchronous_schedule_may_update_twice(workers: WorkerPool, schedule: str) -> None:
    (expected,) = workers.run(1, update_twice, schedule, 1)
    for state in workers.run(2, update_twice, schedule, 2):
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
