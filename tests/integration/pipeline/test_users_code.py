"""What users write in their modules gives under a pipeline what it gives on one device."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import PipelineStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_data,
    make_loader,
    make_module,
    state_of,
)
from tests.helpers.networks.models import make_trainer as plain_trainer
from tests.helpers.processes.workers import WorkerPool


def make_trainer(devices: int, schedule: str = "1f1b", **options: Any) -> L.Trainer:
    strategy: Any = PipelineStrategy(schedule=schedule) if devices > 1 else "auto"
    return plain_trainer(devices=devices, strategy=strategy, **options)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


# --- batches and predictions that are not all tensors --------------------------------------------


class Named(Classifier):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        classes = self.model(batch["x"]).argmax(-1)
        return {"names": batch["name"], "classes": classes.tolist(), "kind": "digits"}


def named_loader() -> DataLoader[Any]:
    data = [{"x": x, "name": f"f{i}"} for i, (x, _) in enumerate(make_data(11))]
    return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


def predict_names(devices: int, schedule: str) -> Any:
    module = make_module(Named)
    module.predict_step = partial(module.predict_step)  # as mocks are, without a name
    return make_trainer(devices, schedule).predict(module, named_loader())


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_lists_with_an_entry_per_sample_are_cut_and_joined(
    workers: WorkerPool, schedule: str
) -> None:
    expected = predict_names(1, schedule)
    assert [len(batch["names"]) for batch in expected] == [4, 4, 3]
    for found in workers.run(2, predict_names, 2, schedule):
        assert found == expected


# --- optimizers ----------------------------------------------------------------------------------


class LooksAtWeights(Classifier):
    """Chooses its rate by the values of all parameters, as layer-wise rates do."""

    rate = 0.0

    def configure_optimizers(self) -> Any:
        self.rate = 1.0 / sum(float(p.detach().norm()) for p in self.parameters())
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def fit_looking(devices: int, layers: str) -> tuple[float, dict[str, Tensor]]:
    strategy: Any = PipelineStrategy(layers=layers) if devices > 1 else "auto"
    module = make_module(LooksAtWeights)
    trainer = plain_trainer(devices=devices, strategy=strategy)
    trainer.fit(module, make_loader(16), make_loader(4))
    return module.rate, state_of(module)


@pytest.mark.some("auto")
@pytest.mark.parametrize("layers", ["auto", "trace"])
def test_an_optimizer_may_depend_on_all_weights(workers: WorkerPool, layers: str) -> None:
    rate, expected = fit_looking(1, layers)
    for found, state in workers.run(2, fit_looking, 2, layers):
        assert found == rate
        for name, value in state.items():
            assert float((value - expected[name]).abs().max()) < 1e-12, name


# --- random numbers ------------------------------------------------------------------------------


class Drawing(Classifier):
    """Draws from all generators, before the model and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def _draw(self) -> float:
        return float(torch.rand(())) + float(np.random.rand()) + random.random()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.drawn.append(self._draw())
        loss = super().training_step(batch, batch_idx)
        self._draw()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.drawn.append(self._draw())
        super().validation_step(batch, batch_idx)


def draw(schedule: str) -> list[float]:
    np.random.seed(int(os.environ["RANK"]))
    module = make_module(Drawing)
    make_trainer(2, schedule).fit(module, make_loader(16, batch_size=1), make_loader(2, 1))
    return module.drawn


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_steps_draw_the_same_on_all_stages_and_new_numbers_for_each_batch(
    workers: WorkerPool, schedule: str
) -> None:
    first, second = workers.run(2, draw, schedule)
    assert first == second
    assert len(set(first)) == len(first)


# --- logging -------------------------------------------------------------------------------------


class Counting(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("five", torch.tensor(5), on_epoch=True)
        x, y = batch
        return F.cross_entropy(self.model(x), y).reshape(1)


def count(devices: int) -> dict[str, float]:
    trainer = make_trainer(devices)
    trainer.fit(make_module(Counting), make_loader(27, 9), make_loader(8))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_whole_numbers_and_a_loss_with_a_dim(workers: WorkerPool) -> None:
    for metrics in workers.run(2, count, 2):
        assert metrics["five"] == 5.0


# --- state outside of the layers -----------------------------------------------------------------


class Stateful(Classifier):
    """Has a frozen teacher, and a buffer that follows the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("smoothed", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(self.teacher(x)), y)
        self.smoothed.mul_(0.9).add_(0.1 * loss.detach())
        return loss


def fit_stateful(devices: int, path: str) -> Any:
    module = make_module(Stateful)
    if devices > 1:  # nobody seeded
        nn.init.normal_(
            module.teacher.weight,
            generator=torch.Generator().manual_seed(int(os.environ["RANK"])),
        )
    trainer = make_trainer(devices)
    trainer.fit(module, make_loader(), make_loader(8))
    trainer.save_checkpoint(path)
    return module.teacher.weight.detach().clone(), float(module.smoothed)


def test_state_outside_of_the_layers(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "state.ckpt")
    (first, _), (second, smoothed) = workers.run(2, fit_stateful, 2, path)
    assert torch.equal(first, second)
    saved = load_full(path)["state_dict"]
    assert torch.equal(saved["teacher.weight"], first)
    assert float(saved["smoothed"]) == smoothed != 0.0


class Remembering(ConvLayer):
    """Keeps a note in the checkpoint that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.note = "none"

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Noted(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            Remembering(), ConvLayer(), Remembering(), nn.Flatten(), nn.Linear(12, 3)
        )


def fit_noted(path: str, resume: bool) -> list[str]:
    module = make_module(Noted)
    mine = [m for m in module.modules() if isinstance(m, Remembering)]
    for index, layer in enumerate(mine):
        layer.note = f"{index}" if not resume else "none"
    trainer = make_trainer(2, max_epochs=1 + resume)
    trainer.fit(module, make_loader(), make_loader(8), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return [m.note for m in module.modules() if isinstance(m, Remembering)]


def test_extra_state_of_layers_comes_back(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "noted.ckpt")
    assert workers.run(2, fit_noted, path, False) == [["0"], ["1"]]
    assert workers.run(2, fit_noted, path, True) == [["0"], ["1"]]


class Longer(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model.append(nn.Linear(3, 3))


def resume_shorter(path: str, module: Any, resume: bool) -> str:
    trainer = make_trainer(2, max_epochs=2)
    built = make_module(module)
    try:
        trainer.fit(built, make_loader(), make_loader(8), ckpt_path=path if resume else None)
    except Exception as error:
        return str(error)
    trainer.save_checkpoint(path)
    return ""


def test_keys_that_nobody_has_are_named(workers: WorkerPool, tmp_path: Path) -> None:
    path = str(tmp_path / "longer.ckpt")
    assert workers.run(2, resume_shorter, path, Longer, False) == ["", ""]
    for text in workers.run(2, resume_shorter, path, Classifier, True):
        assert "Unexpected key(s)" in text
        assert "model.8.weight" in text


# --- layers that write in place ------------------------------------------------------------------


class InPlace(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Flatten(), nn.Linear(12, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)
        )


def fit_in_place(devices: int, schedule: str, versions: str) -> dict[str, Tensor]:
    strategy: Any = PipelineStrategy(schedule=schedule, partition=[2, 2], weight_versions=versions)
    trainer = plain_trainer(devices=devices, strategy=strategy if devices > 1 else "auto")
    module = make_module(InPlace)
    trainer.fit(module, make_loader(8), make_loader(8))
    return {name: p.detach().clone() for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "versions"), [("1f1b", "stash"), ("pipedream", "stash"), ("pipedream", "none")]
)
def test_a_stage_may_begin_with_a_layer_that_writes_in_place(
    workers: WorkerPool, schedule: str, versions: str
) -> None:
    expected = fit_in_place(1, schedule, versions)  # of one batch, which is never stale
    for found in workers.run(2, fit_in_place, 2, schedule, versions):
        for name, value in found.items():
            assert float((value - expected[name]).abs().max()) < 1e-12


# --- tuners and callbacks ------------------------------------------------------------------------


class WithRate(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def find_rate(devices: int, root: str) -> list[float]:
    trainer = make_trainer(devices, default_root_dir=root, max_epochs=10)
    module = make_module(WithRate)
    finder = Tuner(trainer).lr_find(
        module,
        make_loader(),
        make_loader(8),
        num_training=12,
        update_attr=False,
        early_stop_threshold=None,
    )
    assert finder is not None
    return [float(loss) for loss in finder.results["loss"]]


def test_the_learning_rate_finder_finds_the_same(workers: WorkerPool, tmp_path: Path) -> None:
    expected = find_rate(1, str(tmp_path))
    for found in workers.run(2, find_rate, 2, str(tmp_path)):
        assert found == pytest.approx(expected, rel=1e-9)


class Thawing(BaseFinetuning):
    """Adds parameters to the optimizer of the rank that has them, behind an epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[0], optimizer, lr=0.01)


class OfTrainable(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def thaw(folder: str, saves: bool) -> tuple[int, str]:
    callbacks = [Thawing(), *([ModelCheckpoint(folder, every_n_epochs=3)] if saves else [])]
    trainer = make_trainer(2, callbacks=callbacks, enable_checkpointing=saves, max_epochs=4)
    try:
        trainer.fit(make_module(OfTrainable), make_loader(), make_loader(8))
        trainer.save_checkpoint(f"{folder}/late")
    except Exception as error:
        return trainer.current_epoch, str(error)
    return trainer.current_epoch, ""


def test_added_groups_are_refused_before_they_are_trained_or_when_saved_on_all_ranks(
    workers: WorkerPool, tmp_path: Path
) -> None:
    for saves in (True, False):
        for epoch, text in workers.run(2, thaw, str(tmp_path), saves):
            assert epoch == (1 if saves else 4), text
            assert "2 parameter groups, but `configure_optimizers` made 1" in text


def shares_among_ranks() -> str:
    trainer = make_trainer(devices=2)
    data = make_data(16)
    loader = DataLoader(
        data, batch_size=4, sampler=DistributedSampler(data, 2, trainer.global_rank)
    )
    with pytest.raises(ValueError, match="for 2 replicas, and there is 1"):
        trainer.fit(make_module(), loader, make_loader(8))
    return "refused"


def test_a_sampler_for_ranks_of_one_replica_is_refused(workers: WorkerPool) -> None:
    """Half of the samples would never be read."""
    assert workers.run(2, shares_among_ranks) == ["refused"] * 2
