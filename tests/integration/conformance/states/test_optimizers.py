"""Every optimizer of torch trains, is saved and resumes under every strategy, or is refused.

It updates as on a GPU, by groups: with ``foreach`` unless it was asked for another way.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, DistributedSampler

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.engine.tensors.dtensor import local_part
from tests.differential.dials.optimizers import OneEstimate
from tests.helpers.networks.chosen import chosen
from tests.helpers.networks.foreach import foreach_by_default
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_layers,
    make_loader,
    make_module,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import assert_close, joined

TOLERANCE = 1e-10

OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "Adadelta": optim.Adadelta,
    "Adafactor": partial(optim.Adafactor, lr=0.05),
    "Adagrad": partial(optim.Adagrad, lr=0.05, initial_accumulator_value=0.1),
    "Adagrad, fused": partial(optim.Adagrad, lr=0.05, fused=True),
    "Adam, amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True),
    "AdamW": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "AdamW, fused": partial(optim.AdamW, lr=0.01, fused=True),
    "Adamax": partial(optim.Adamax, lr=0.01),
    "ASGD": partial(optim.ASGD, lr=0.05, t0=1),
    "LBFGS": partial(optim.LBFGS, lr=0.5, max_iter=2),
    "Muon": partial(optim.Muon, lr=0.05),
    "NAdam": partial(optim.NAdam, lr=0.01),
    "RAdam": partial(optim.RAdam, lr=0.01),
    "RMSprop": partial(optim.RMSprop, lr=0.005, momentum=0.5, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "SGD": partial(optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "SGD, fused": partial(optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1, fused=True),
    "SparseAdam": partial(optim.SparseAdam, lr=0.01),
}


@dataclass(frozen=True)
class Layout:
    devices: int
    replicas: int
    make: Callable[[], Strategy]
    is_synchronous: bool = True


PLAN = {"model.*.linear": "colwise_gather"}
HALVES = PipelineConfig(num_microbatches=2)
LAYOUTS = {
    "ddp": Layout(2, 2, DDPStrategy),
    "fsdp": Layout(2, 2, FSDPStrategy),
    "tp": Layout(2, 1, partial(TensorParallelStrategy, plan=PLAN)),
    "1f1b": Layout(2, 1, partial(PipelineStrategy, schedule="1f1b", num_microbatches=2)),
    "pipedream": Layout(2, 1, partial(PipelineStrategy, schedule="pipedream"), False),
    "pipedream_2bw": Layout(
        2, 1, partial(PipelineStrategy, schedule="pipedream_2bw", num_microbatches=2), False
    ),
    "mesh": Layout(4, 2, partial(MeshStrategy, pp=2, pipeline=HALVES)),
    "shards of tp": Layout(4, 2, partial(MeshStrategy, tp=2, tensor=TensorConfig(PLAN))),
    "stages of tp": Layout(
        4, 1, partial(MeshStrategy, pp=2, tp=2, tensor=TensorConfig(PLAN), pipeline=HALVES)
    ),
}


class Matrices(nn.Module):
    """A layer whose parameters are matrices, as Muon wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Table(nn.Module):
    """A layer whose gradients are sparse, as SparseAdam wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12).requires_grad_(False)
        self.table = nn.Embedding(12, 12, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) @ self.table(torch.arange(12)))


class Trained(L.LightningModule):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        if optimizer == "Muon":
            layers = [Matrices() for _ in range(3)]
            self.model = nn.Sequential(nn.Flatten(), *layers, nn.Linear(12, 3, bias=False))
        elif optimizer == "SparseAdam":
            tables = [Table() for _ in range(3)]
            self.model = nn.Sequential(nn.Flatten(), *tables, nn.Softmax(dim=1))
        else:
            self.model = make_layers(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> optim.Optimizer:
        return OPTIMIZERS[self.optimizer]([p for p in self.parameters() if p.requires_grad])


class SaveOnTheWay(Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fit(optimizer: str, layout: Layout | None, save: str | None, resume: str | None) -> Any:
    module = make_module(Trained, optimizer=optimizer)
    trainer = make_trainer(
        devices=layout.devices if layout else 1,
        strategy=layout.make() if layout else "auto",
        max_epochs=2,
        callbacks=[SaveOnTheWay(save)] if save else [],
    )
    data, replicas = make_data(16), layout.replicas if layout else 1
    sampler = None
    if layout:
        place = trainer.strategy.distributed_sampler_kwargs
        sampler = DistributedSampler(data, shuffle=False, **place)
    loader = DataLoader(data, batch_size=8 // replicas, sampler=sampler)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=True)
    return state_of(module)


Runs = tuple[dict[str, Tensor], dict[str, Tensor]] | str


def fit_each(name: str, optimizers: Sequence[str], folder: str) -> dict[str, Runs]:
    """Gives the weights of a run, and of one that resumed its checkpoint; or the refusal."""
    results: dict[str, Runs] = {}
    with float64(), foreach_by_default():
        for number, optimizer in enumerate(optimizers):
            path = f"{folder}/{number}.ckpt"
            try:
                through = fit(optimizer, LAYOUTS[name], path, None)
                results[optimizer] = through, fit(optimizer, LAYOUTS[name], None, path)
            except ValueError as error:
                results[optimizer] = str(error)
    return results


@contextmanager
def float64() -> Iterator[None]:
    """Lets runs be compared to rounding: Muon multiplies in bfloat16, NAdam keeps a float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "bfloat16", Tensor.double)
            yield
    finally:
        torch.set_default_dtype(before)


SHARDED = ("fsdp", "tp", "mesh", "shards of tp", "stages of tp")
WITH_SHARDS = ("fsdp", "mesh", "shards of tp")
REFUSED = {
    **{("LBFGS", layout): "LBFGS lays all" for layout in LAYOUTS if layout != "ddp"},
    **{("Adafactor", layout): "Adafactor estimates" for layout in SHARDED},
    **{("Adagrad, fused", layout): "Adagrad has groups of" for layout in SHARDED},
    **{("Rprop", layout): "Rprop writes where" for layout in SHARDED},
    **{("SparseAdam", layout): "The gradients of ['model.1.table'" for layout in WITH_SHARDS},
}


@pytest.fixture(scope="module")
def fitted(
    request: pytest.FixtureRequest,
    workers: WorkerPool,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], list[dict[str, Runs]]]:
    """Gives what each rank has of a layout's runs, which are one case: torch learns once."""

    @cache
    def run(name: str) -> list[dict[str, Runs]]:
        folder = str(tmp_path_factory.mktemp("saved"))
        wanted = sorted(set(chosen(request.session, "fitted", "optimizer", request.path)))
        return workers.run(LAYOUTS[name].devices, fit_each, name, wanted, folder, timeout=240.0)

    return run


@cache
def single_device(optimizer: str) -> dict[str, Tensor]:
    with pytest.MonkeyPatch.context() as patch, float64(), foreach_by_default():
        patch.delenv("WORLD_SIZE", raising=False)
        state: dict[str, Tensor] = fit(optimizer, None, None, None)
        return state


@pytest.mark.some(
    "pipedream-Adafactor",
    "pipedream-AdamW, fused",
    "pipedream-ASGD",
    "pipedream-LBFGS",
    "pipedream-Muon",
    "pipedream-Rprop",
    "pipedream-SGD",
    "pipedream-SparseAdam",
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_trains_and_resumes_as_on_one_device(
    fitted: Callable[[str], list[dict[str, Runs]]], name: str, optimizer: str
) -> None:
    ranks = [of_rank[optimizer] for of_rank in fitted(name)]
    if (optimizer, name) in REFUSED:
        assert all(str(rank).startswith(REFUSED[optimizer, name]) for rank in ranks), ranks
        return
    assert not any(isinstance(rank, str) for rank in ranks), ranks
    through, resumed = (joined([rank[i] for rank in ranks]) for i in range(2))
    assert through.keys() == resumed.keys() == single_device(optimizer).keys()
    for parameter, value in single_device(optimizer).items():
        assert torch.equal(resumed[parameter], through[parameter]), parameter
        difference = float((through[parameter] - value).abs().max())
        assert difference < TOLERANCE or not LAYOUTS[name].is_synchronous, parameter


def test_the_table_has_each_optimizer_of_torch() -> None:
    classes = {name for name, kind in vars(optim).items() if isinstance(kind, type)}
    assert {name.partition(",")[0] for name in OPTIMIZERS} == classes - {"Optimizer"}


class Untrained(Trained):
    def configure_optimizers(self) -> None:
        return None


def fit_untrained(layout: Layout, save: str, resume: str | None) -> Any:
    module = make_module(Untrained, optimizer="SGD")
    trainer = make_trainer(devices=layout.devices, strategy=layout.make(), max_epochs=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*this fit will run with no optimizer")
        trainer.fit(module, DataLoader(make_data(16), batch_size=8), ckpt_path=resume)
    trainer.save_checkpoint(save)
    return state_of(module)


@pytest.mark.some("1f1b")
@pytest.mark.parametrize("name", ["ddp", "fsdp", "tp", "1f1b"])
def test_a_run_without_an_optimizer_is_saved_and_resumed(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    path, layout = tmp_path / "none.ckpt", LAYOUTS[name]
    before = joined(workers.run(2, fit_untrained, layout, str(path), None))
    after = joined(workers.run(2, fit_untrained, layout, str(path), str(path)))
    expected = state_of(make_module(Untrained, optimizer="SGD"))
    for name, value in expected.items():
        assert torch.equal(before[name], value)
        assert torch.equal(after[name], value)


class Estimating(Classifier):
    """Has an optimizer with one estimate for all parameters."""

    def configure_optimizers(self) -> Any:
        return OneEstimate(self.parameters())


def fit_with_estimate(layout: str) -> dict[str, Tensor]:
    module, strategy, devices = make_module(Estimating, depth=2), "auto", 1
    loader = make_loader(16)
    if layout in LAYOUTS:
        known = LAYOUTS[layout]
        strategy, devices = known.make(), known.devices
        if known.replicas > 1:
            replica = int(os.environ["RANK"]) // (known.devices // known.replicas)
            loader = share_of(replica, 16)
    make_trainer(devices=devices, strategy=strategy, max_epochs=2).fit(module, loader, loader)
    return state_of(module)


ON_STAGES = ("1f1b", "pipedream", "pipedream_2bw", "mesh", "stages of tp")


@pytest.mark.some("fsdp")
@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in ON_STAGES])
def test_one_estimate_is_of_all_gradients(workers: WorkerPool, layout: str) -> None:
    (expected,) = workers.run(1, fit_with_estimate, "one device")
    for found in workers.run(LAYOUTS[layout].devices, fit_with_estimate, layout):
        assert_close(found, expected)


class OwnEstimate(optim.SGD):
    """Trains at a rate that is an estimate from a rank's own part of the gradients."""

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            group["d"] = sum(float(local_part(p.grad).abs().sum()) for p in group["params"])
        super().step()
        return loss


class EstimatingApart(Classifier):
    def configure_optimizers(self) -> Any:
        return OwnEstimate(self.parameters(), lr=0.05)


def reached_with(class_: type[Classifier], layout: str, validates: bool) -> str:
    trainer = make_trainer(
        devices=LAYOUTS[layout].devices,
        strategy=LAYOUTS[layout].make(),
        num_sanity_val_steps=2,
        limit_val_batches=1.0 if validates else 0,
    )
    reached: list[str] = []
    module = make_module(class_, depth=2)
    module.on_validation_start = lambda: reached.append("validation")
    module.on_train_epoch_end = lambda: reached.append("end of epoch")
    loader = make_loader(8, batch_size=4)
    said = "one estimate for all parameters|by the gradients of others"
    with pytest.raises(ValueError, match=said):
        trainer.fit(module, loader, loader)
    return ", ".join(reached)


@pytest.mark.some("fsdp")
@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in ("ddp", *ON_STAGES)])
def test_estimates_that_differ_are_refused_before_validation_and_at_the_end(
    workers: WorkerPool, layout: str
) -> None:
    devices = LAYOUTS[layout].devices
    # The first validation is the sanity check, when no estimate has been made.
    for validates, reached in ((True, "validation"), (False, "end of epoch")):
        found = workers.run(devices, reached_with, EstimatingApart, layout, validates)
        assert found == [reached] * devices


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("layout", ON_STAGES)
def test_an_estimate_of_all_parameters_is_refused_on_stages(
    workers: WorkerPool, layout: str
) -> None:
    devices = LAYOUTS[layout].devices
    assert workers.run(devices, reached_with, Estimating, layout, True) == [""] * devices
