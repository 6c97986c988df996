"""Ranks with different numbers of batches equal a recursion that means over those that have one."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset
from torchmetrics import MeanMetric

from lightning_dist import DDPStrategy
from lightning_dist.strategies.base.loaders.uneven import UnevenInputs
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool

EPOCHS = 2
LENGTHS = (3, 6, 5)
FAR = 1e-12


class Synced(Classifier):
    """Logs over all ranks, at each step too."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **{**kwargs, "sync_dist": True})


def uneven_share(rank: int, lengths: tuple[int, ...]) -> DataLoader[Any]:
    """So many batches of three samples that no other rank has."""
    start = 3 * sum(lengths[:rank])
    own = range(start, start + 3 * lengths[rank])
    return DataLoader(Subset(make_data(3 * sum(lengths)), own), batch_size=3)


class Losses(L.Callback):
    """Keeps what is known of the loss on this rank after each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.validated_at: list[int] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["train_loss_step"]))

    def on_validation_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.validated_at.append(trainer.global_step)


def fit(optimizer: str, accumulate: int, resume: str | None, root: str | None, epochs: int) -> Any:
    rank = int(os.environ["RANK"])
    module = make_module(Synced, optimizer=optimizer, schedule_lr=True)
    losses = Losses()
    trainer = make_trainer(
        devices=len(LENGTHS),
        strategy=DDPStrategy(uneven_inputs=True, save_full=True),
        accumulate_grad_batches=accumulate,
        max_epochs=epochs,
        val_check_interval=2,
        num_sanity_val_steps=0,
        callbacks=[losses, *([ModelCheckpoint(root, every_n_train_steps=2)] if root else [])],
        enable_checkpointing=root is not None,
        gradient_clip_val=0.5,
    )
    trainer.fit(
        module, uneven_share(rank, LENGTHS), make_loader(8), ckpt_path=resume, weights_only=True
    )
    if root is not None:
        trainer.save_checkpoint(f"{root}/end.ckpt")
    mean = float(trainer.callback_metrics["train_loss_epoch"])
    return state_of(module), trainer.global_step, losses.seen, losses.validated_at, mean


def recursion(optimizer_name: str, accumulate: int) -> Any:
    """One replica that sees, at each position, the mean over the ranks that have a batch there."""
    module = make_module()
    optimizer = make_optimizer(optimizer_name, module.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    shares = [list(uneven_share(rank, LENGTHS)) for rank in range(len(LENGTHS))]
    seen, means, steps = [], [], 0
    for _ in range(EPOCHS):
        everything: list[float] = []
        for position in range(max(LENGTHS)):
            present = [share[position] for share in shares if position < len(share)]
            losses = [F.cross_entropy(module.model(x), y) for x, y in present]
            (torch.stack(losses).mean() / accumulate).backward()
            seen.append(torch.stack(losses).mean().item())
            everything += [loss.item() for loss in losses]
            if (position + 1) % accumulate == 0 or position + 1 == max(LENGTHS):
                nn.utils.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                steps += 1
        means.append(sum(everything) / len(everything))
    return state_of(module), steps, seen, means[-1]


@pytest.mark.some("adamw-2")
@pytest.mark.parametrize(("optimizer", "accumulate"), [("sgd", 1), ("adamw", 1), ("adamw", 2)])
def test_equals_the_recursion(workers: WorkerPool, optimizer: str, accumulate: int) -> None:
    state, steps, seen, mean = recursion(optimizer, accumulate)
    ranks = workers.run(3, fit, optimizer, accumulate, None, None, EPOCHS)
    for rank, (found, found_steps, found_losses, validated_at, found_mean) in enumerate(ranks):
        assert found_steps == steps
        assert validated_at == ranks[0][3] == [s // accumulate for s in (2, 4, 6, 8, 10, 12)]
        assert found_mean == pytest.approx(mean, abs=FAR)
        for name, value in state.items():
            assert float((found[name] - value).abs().max()) < FAR, name
        for index, loss in enumerate(found_losses):
            if index % max(LENGTHS) < LENGTHS[rank]:
                assert loss == pytest.approx(seen[index], abs=FAR)


def test_is_saved_in_the_middle_and_resumed(workers: WorkerPool, tmp_path: Path) -> None:
    whole = workers.run(3, fit, "adamw", 1, None, None, EPOCHS)
    workers.run(3, fit, "adamw", 1, None, str(tmp_path), 1)
    resumed = workers.run(3, fit, "adamw", 1, str(tmp_path / "end.ckpt"), str(tmp_path), EPOCHS)
    for (one, *_), (other, *_) in zip(whole, resumed, strict=True):
        for name in one:
            # Buckets are formed anew, so that three gradients may be added up in another order.
            assert float((one[name] - other[name]).abs().max()) < 1e-15, name


# --- what does not go ----------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_data(8))


class Continued(DataLoader[Any]):
    def __init__(self) -> None:
        super().__init__(make_data(8))

    def load_state_dict(self, state: Any) -> None: ...


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class SyncedMetric(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric(dist_sync_on_step=True)


def attempt(module: Any, loaders: str) -> str:
    own: Any = {
        "none": lambda: make_loader(8 * int(os.environ["RANK"])),
        "endless": lambda: DataLoader(Endless(), batch_size=4),
        "two": lambda: {"a": make_loader(8), "b": make_loader(8)},
        "continued": Continued,
        "one": lambda: make_loader(8),
    }[loaders]()
    trainer = make_trainer(devices=2, strategy=DDPStrategy(uneven_inputs=True))
    with pytest.raises(ValueError, match="uneven_inputs=True") as error:
        trainer.fit(make_module(module), own, make_loader(8))
    return str(error.value)


@pytest.mark.parametrize(
    ("module", "loaders", "message"),
    [
        (Classifier, "none", r"\[0, 1\] batches. Each must"),
        (Classifier, "endless", r"\[None, None\] batches. Each must have a length"),
        (Classifier, "continued", r"loaders of ranks \[0, 1\] have a `load_state_dict`"),
        (Classifier, "two", "one training loader, not a dict"),
        (Manual, "one", "automatic_optimization=False"),
        (SyncedMetric, "one", "the metric 'mean' with dist_sync_on_step"),
    ],
    ids=["a rank without data", "no length", "state", "two loaders", "manual", "metric"],
)
def test_is_refused_on_each_rank(
    workers: WorkerPool, module: Any, loaders: str, message: str
) -> None:
    for text in workers.run(2, attempt, module, loaders):
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sync_every": 2}, "sync_every=2"),
        ({"static_graph": True}, "static_graph=True"),
        ({"find_unused_parameters": True}, "find_unused_parameters=True"),
    ],
)
def test_arguments_that_do_not_go_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DDPStrategy(uneven_inputs=True, **arguments)


def test_an_empty_step_is_zero_whatever_the_weights() -> None:
    layer = nn.Linear(2, 2)
    layer.weight.data[0, 0] = float("nan")
    layer.scale = nn.Parameter(torch.tensor(float("inf")))
    loss: Tensor = UnevenInputs(layer, Mock(), timedelta(seconds=1))._zero_loss()
    loss.backward()
    assert loss.item() == 0
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in layer.parameters())
