"""What steps keep in the module is there for the hooks at the end of an epoch, on each rank."""

from __future__ import annotations

import gc
import os
import threading
import warnings
import weakref
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from lightning_dist.strategies.pipelining.results.hook_log import HookLog
from lightning_dist.strategies.pipelining.results.outside_tensors import OutsideTensors
from lightning_dist.strategies.pipelining.results.rank_zero_calls import RankZeroCalls
from lightning_dist.strategies.pipelining.results.step_state import StepState
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Keeping(Classifier):
    """Keeps outputs and counts in each way that users do."""

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []
        self.by_loader: dict[int, list[Tensor]] = defaultdict(list)
        self.lists: list[list[Tensor]] = [[], []]
        self.num_right_of = [0, 0]
        self.num_right = 0
        self.classes: set[int] = set()
        self.counts: Counter[int] = Counter()
        self.latest: deque[float] = deque(maxlen=2)
        self.moving: Tensor | None = None
        self.register_buffer("seen", torch.zeros(3, dtype=torch.long))
        self._losses: list[Tensor] = []
        self.ranks: list[int] = []
        self.found: dict[str, Any] = {}

    def _keep(self, x: Tensor, y: Tensor, loader: int = 0) -> Tensor:
        logits = self.model(x)
        best = logits.argmax(-1)
        self.logits.append(logits)
        self.by_loader[loader].append(logits)
        self.lists[loader].append(logits)
        self.num_right_of[loader] += int((best == y).sum())
        self.num_right += int((best == y).sum())
        self.classes |= {*best.tolist()}
        self.counts.update(best.tolist())
        self.latest.extend(logits[:, 0].tolist())
        self.moving = logits[-1]
        self.seen += torch.bincount(y, minlength=3)
        return F.cross_entropy(logits, y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.ranks.append(-1)  # ahead of the model, so on each rank
        loss = self._keep(*batch)
        self._losses.append(loss * len(batch[0]))  # with its graph, as it happens
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._keep(*batch, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._keep(*batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        self._keep(*batch)
        return self.logits[-1]

    def on_train_batch_end(self, *_: Any) -> None:
        self.ranks.append(int(os.environ.get("RANK", 0)))  # a rank's own

    def _end(self, stage: str) -> None:
        of_loaders = [torch.cat(self.by_loader[loader]) for loader in sorted(self.by_loader)]
        of_loaders += [torch.cat(logits) for logits in self.lists if logits]
        of_loaders.append(torch.tensor(self.num_right_of))
        assert self.moving is not None
        tensors = [torch.cat(self.logits), *of_loaders, self.moving, self.seen]
        self.found[stage] = [tensor.detach().clone() for tensor in tensors]
        plain = {self.num_right, *self.classes}, dict(self.counts), [*map(float, self.latest)]
        self.found[f"{stage} plain"] = plain
        self.logits.clear()
        self.by_loader.clear()
        self.lists, self.num_right_of = [[], []], [0, 0]
        self.num_right = 0
        self.classes, self.counts, self.latest = set(), Counter(), deque(maxlen=2)

    def on_train_epoch_end(self) -> None:
        total = torch.stack(self._losses).sum().detach()
        self.found["train"] = [total, self.seen.clone()]
        self.found["train plain"] = {self.num_right}, {}, []  # validation has begun anew
        self._losses.clear()

    def on_validation_epoch_end(self) -> None:
        self._end("validate")

    def on_test_epoch_end(self) -> None:
        self._end("test")

    def on_predict_epoch_end(self) -> None:
        self._end("predict")


def keep(devices: int, name: str) -> tuple[dict[str, Any], list[int]]:
    strategy: Any = "auto"
    if devices > 1:
        strategy = MeshStrategy(pp=2) if name == "mesh" else PipelineStrategy(schedule=name)
    module = make_module(Keeping)
    trainer = make_trainer(devices=devices, strategy=strategy, limit_val_batches=2, max_epochs=2)
    trainer.fit(module, make_loader(16), [make_loader(8), make_loader(8)])
    trainer.test(module, make_loader(8), verbose=False)
    trainer.predict(module, make_loader(8))
    return module.found, module.ranks


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zbv", "mesh"])
def test_all_ranks_have_what_one_device_has(workers: WorkerPool, name: str) -> None:
    expected, _ = keep(1, name)
    assert {*expected} >= {"train", "validate", "test", "predict"}
    for rank, (found, ranks) in enumerate(workers.run(2, keep, 2, name)):
        assert {*ranks} == {rank, -1}
        for stage in ("train", "validate", "test", "predict"):
            for tensor, other in zip(found[stage], expected[stage], strict=True):
                assert torch.allclose(tensor, other, rtol=0, atol=1e-12), stage
            right, counts, latest = expected[f"{stage} plain"]
            assert found[f"{stage} plain"][:2] == (right, counts)
            assert found[f"{stage} plain"][2] == pytest.approx(latest, abs=1e-12)


class Locked(Classifier):
    """Keeps what cannot be sent."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])
        self.kept.append(threading.Lock())


def keep_locked() -> tuple[int, list[str]]:
    module = make_module(Locked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(devices=2, strategy=PipelineStrategy()).validate(module, make_loader(8))
    return len(module.kept), [str(w.message) for w in caught if "kept" in str(w.message)]


def test_what_cannot_be_pickled_stays_and_is_named(workers: WorkerPool) -> None:
    (first, (message,)), (last, silent) = workers.run(2, keep_locked)
    assert (first, silent) == (0, [])
    assert last > 0
    assert "`self.kept`, of which a copy cannot be pickled" in message


def parts_left() -> list[str]:
    """Names the parts of a run's session that only a garbage collection would free."""
    made: list[weakref.ref[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind in (StepState, OutsideTensors, HookLog, RankZeroCalls):
            own = kind.__init__

            def noted(self: Any, *args: Any, _own: Any = own, **kwargs: Any) -> None:
                _own(self, *args, **kwargs)
                made.append(weakref.ref(self))

            patch.setattr(kind, "__init__", noted)
        gc.disable()
        try:
            trainer = make_trainer(devices=2, strategy=PipelineStrategy(), max_epochs=1)
            trainer.fit(make_module(Keeping), make_loader(16), make_loader(8))
            assert len(made) == 4
            return [type(left).__name__ for ref in made if (left := ref()) is not None]
        finally:
            gc.enable()


def test_no_part_with_a_group_is_freed_later(workers: WorkerPool) -> None:
    # In a process that a loader has forked, gloo would wait for threads that are not there.
    assert workers.run(2, parts_left) == [[], []]


class Relabels(Classifier):
    """Reads labels that its steps write."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = make_data(16).tensors[1].clone()

    def train_dataloader(self) -> Any:
        x = make_data(16).tensors[0]
        return DataLoader(TensorDataset(x, self.labels, torch.arange(16)), batch_size=8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, index = batch
        logits = self.model(x)
        self.labels[index] = logits.argmax(-1)
        return F.cross_entropy(logits, y)


def relabel(devices: int) -> dict[str, Any]:
    strategy: Any = PipelineStrategy() if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=3, limit_val_batches=0)
    module = make_module(Relabels)
    trainer.fit(module, val_dataloaders=make_loader(8))
    return state_of(module)


def test_a_loader_reads_what_steps_have_written(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, relabel, 1)
    for state in workers.run(2, relabel, 2):
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)


class Annealed(Classifier):
    """Has losses that depend on how many steps there were, and counts other things, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num", torch.tensor(0))
        self.steps, self.seen, self.rows = 0, 0, 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num += 1
        self.steps += 1
        loss: Tensor = super().training_step(batch, batch_idx) * 0.9**self.num / self.steps
        self.seen += len(batch[0])
        self.rows += 0.5
        return loss


def warned_of_counters(num_microbatches: int) -> list[str]:
    strategy = PipelineStrategy(num_microbatches=num_microbatches)
    trainer = make_trainer(devices=2, strategy=strategy, max_epochs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(make_module(Annealed), make_loader(24), make_loader(8))
    return [str(w.message) for w in caught if "each micro-batch" in str(w.message)]


def test_counters_of_micro_batches_are_warned_of(workers: WorkerPool) -> None:
    first, (text,) = workers.run(2, warned_of_counters, 2)
    assert first == []  # it leaves each step where the next stage's layers begin
    assert text.startswith("Each step has added one to ['num', 'steps'], and a step runs once for")
    assert workers.run(2, warned_of_counters, 1) == [[], []]


# --- what steps set in the optimizer --------------------------------------------------------------


class Warming(Classifier):
    """Sets the learning rate in the step, where only the last stage comes to."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = 0.02 * (self.global_step + 1)
        return loss


def warm_up(devices: int, schedule: str) -> tuple[dict[str, Tensor], float]:
    strategy: Any = PipelineStrategy(schedule=schedule) if devices > 1 else "auto"
    module = make_module(Warming)
    trainer = make_trainer(devices=devices, strategy=strategy, accumulate_grad_batches=2)
    trainer.fit(module, make_loader(), make_loader(8))
    return state_of(module), trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_all_stages_have_the_rate_that_a_step_sets(workers: WorkerPool, schedule: str) -> None:
    expected, rate = warm_up(1, schedule)
    for state, found in workers.run(2, warm_up, 2, schedule):
        assert found == rate
        for name, value in state.items():
            assert float((value - expected[name]).abs().max()) < 1e-12, name


# --- checkpoints ----------------------------------------------------------------------------------


class Remembering(Classifier):
    """Counts in the step, and saves the count."""

    num_seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.num_seen += len(batch[0])
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_seen"] = self.num_seen


def save_inside_of_epochs(devices: int, folder: str) -> None:
    strategy: Any = PipelineStrategy(schedule="pipedream") if devices > 1 else "auto"
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
    options = {"callbacks": saving, "enable_checkpointing": True, "max_epochs": 2}
    trainer = make_trainer(devices=devices, strategy=strategy, **options)
    trainer.fit(make_module(Remembering), make_loader(), make_loader(8))


def test_a_checkpoint_has_what_the_latest_step_keeps(workers: WorkerPool, tmp_path: Path) -> None:
    workers.run(2, save_inside_of_epochs, 2, str(tmp_path))
    saved = {int(file.stem.removeprefix("step=")): file for file in tmp_path.iterdir()}
    found = {step: load_full(file, weights_only=False)["num_seen"] for step, file in saved.items()}
    assert found == {2: 16, 4: 32, 6: 46, 8: 62, 10: 78, 12: 92}
