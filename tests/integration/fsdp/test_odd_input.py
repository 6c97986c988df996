"""Modules and trainers that are used in unusual ways, sharded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import FSDPStrategy
from lightning_dist.engine.tensors.dtensor import is_dtensor
from tests.helpers.networks.models import (
    Classifier,
    assert_equal,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


def fit(module: Any, ckpt_path: str | None = None, **options: Any) -> Any:
    trainer = make_trainer(devices=2, strategy=FSDPStrategy(), **options)
    loaders = share_of(int(os.environ["RANK"]), 44), make_loader(8)
    trainer.fit(module, *loaders, ckpt_path=ckpt_path, weights_only=True)
    return trainer


class Transposed(Classifier):
    """Has weights that lie in memory in another order than that of their dims."""

    def __init__(self, late: bool = False) -> None:
        super().__init__(depth=2)
        self.late = late
        if not late:
            self.make()

    def make(self) -> None:
        torch.manual_seed(4)
        self.turn = nn.Parameter(torch.randn(6, 12).t().double())
        self.image = nn.Conv2d(2, 2, 3, padding=1).to(
            torch.double, memory_format=torch.channels_last
        )

    def configure_model(self) -> None:
        if self.late and not hasattr(self, "turn"):
            self.make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = (x.flatten(1) @ self.turn).reshape(-1, 1, 2, 3)
        x = self.image(x.expand(-1, 2, -1, -1)).reshape(-1, 2, 6)
        return super().training_step((x, y), batch_idx)


def fit_transposed(devices: int, late: bool) -> dict[str, Tensor]:
    module = make_module(Transposed, late=late)
    if devices > 1:
        fit(module)
    else:
        trainer = make_trainer(accumulate_grad_batches=2)
        loader = [
            batch for pair in zip(share_of(0, 44), share_of(1, 44), strict=True) for batch in pair
        ]
        trainer.fit(module, DataLoader(loader, batch_size=None), make_loader(8))  # type: ignore[arg-type]
    return state_of(module)


@pytest.mark.parametrize("late", [False, True])
def test_another_order_in_memory(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit_transposed(1, late)
    for state in workers.run(2, fit_transposed, 2, late):
        assert_equal(state, expected)


SHORT_RUNS: dict[str, tuple[dict[str, Any], int]] = {
    "fast_dev_run": ({"fast_dev_run": True}, 1),
    "overfit_batches": ({"overfit_batches": 2}, 2),
    "limit_train_batches": ({"limit_train_batches": 0.5, "val_check_interval": 2}, 3),
}


def steps_of_short_runs() -> dict[str, int]:
    return {
        n: fit(make_module(depth=2), **options).global_step
        for n, (options, _) in SHORT_RUNS.items()
    }


def test_runs_that_are_cut_short(workers: WorkerPool) -> None:
    expected = {name: steps for name, (_, steps) in SHORT_RUNS.items()}
    assert workers.run(2, steps_of_short_runs) == [expected] * 2


class WithExample(Classifier):
    """Asks the summary for the sizes of its activations, in which a sharded model has none."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(3, 2, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class Summary(ModelSummary):
    total_parameters = 0

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self.total_parameters = summarize(pl_module).total_parameters


def summarise() -> tuple[int, bool]:
    module, summary = make_module(WithExample), Summary()
    fit(module, callbacks=[summary], fast_dev_run=True)
    return summary.total_parameters, module.example_input_array is not None


def test_the_summary_shows_the_whole_model(workers: WorkerPool) -> None:
    total = sum(p.numel() for p in make_module().parameters())
    assert workers.run(2, summarise) == [(total, True)] * 2


class FailsInValidation(Classifier):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        raise KeyError("the user's own mistake")


class FailsInTraining(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise KeyError("the user's own mistake")
        return loss


class ReturnsNone(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


def end_badly(kind: Any) -> tuple[str, str, bool]:
    module = make_module(kind, depth=2)
    with pytest.raises((KeyError, RuntimeError)) as caught:
        fit(module, num_sanity_val_steps=0)
    return caught.type.__name__, str(caught.value), all(is_dtensor(p) for p in module.parameters())


@pytest.mark.some(
    "FailsInValidation-KeyError-the user's own", "FailsInTraining-KeyError-the user's own"
)
@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        (FailsInValidation, "KeyError", "the user's own"),
        (FailsInTraining, "KeyError", "the user's own"),
        (ReturnsNone, "RuntimeError", "returning None in distributed training"),
    ],
)
def test_an_exception_leaves_no_parameter_gathered(
    workers: WorkerPool, kind: Any, error: str, message: str
) -> None:
    for name, text, are_spread in workers.run(2, end_badly, kind):
        assert name == error
        assert message in text
        assert are_spread


class Longer(Classifier):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.extra = nn.Linear(2, 2)


def load_each_other(directory: str) -> list[str]:
    messages = []
    for kind, other in ((Classifier, Longer), (Longer, Classifier)):
        path = f"{directory}/{kind.__name__}.ckpt"
        trainer = make_trainer(devices=2, strategy=FSDPStrategy())
        trainer.validate(make_module(kind, depth=2), make_loader(8), verbose=False)
        trainer.save_checkpoint(path)
        trainer = make_trainer(devices=2, strategy=FSDPStrategy())
        with pytest.raises(RuntimeError) as caught:
            trainer.validate(
                make_module(other, depth=2), make_loader(8), ckpt_path=path, weights_only=True
            )
        messages.append(str(caught.value))
    return messages


def test_missing_and_unexpected_keys_are_named(workers: WorkerPool, tmp_path: Path) -> None:
    for missing, unexpected in workers.run(2, load_each_other, str(tmp_path)):
        assert 'Missing key(s) in state_dict: "extra.weight", "extra.bias"' in missing
        assert 'Unexpected key(s) in state_dict: "extra.weight", "extra.bias"' in unexpected
