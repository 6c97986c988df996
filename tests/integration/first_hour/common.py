"""Run a module as a newcomer would, and compare it with one device.

A run has no seed: each process draws weights and data of its own, as it does in a script without
``seed_everything``. What the ranks held at the first batch, and which batches they saw, is noted;
one device then starts from those weights and trains on those batches, joined over replicas. The
batches themselves are compared with the data: each epoch has each sample once.
"""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.tensors.dtensor import whole
from tests.integration.first_hour.modules import MODULES, Sample

STRATEGIES = {
    "PipelineStrategy()": (PipelineStrategy, {}, 2),
    "DDPStrategy()": (DDPStrategy, {}, 2),
    "FSDPStrategy()": (FSDPStrategy, {}, 2),
    "TensorParallelStrategy()": (TensorParallelStrategy, {}, 2),
    "MeshStrategy()": (MeshStrategy, {}, 4),
    "MeshStrategy(pp=2)": (MeshStrategy, {"pp": 2}, 2),
    "MeshStrategy(tp=2)": (MeshStrategy, {"tp": 2}, 4),
}
TOLERANCE = 1e-9
BATCH_SIZE = 8
NUM_SAMPLES = 24
NUM_EPOCHS = 2
RANDOM = "random data"


class Samples(Dataset[Any]):
    """The same samples in each process; or new ones at each look, drawn without a seed."""

    def __init__(self, sample: Sample, is_random: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = [sample(generator) for _ in range(NUM_SAMPLES)]
        self.draw = sample
        self.is_random = is_random

    def __len__(self) -> int:
        return len(self.samples)

    def draws(self, metric: str) -> bool:
        """Checks whether a metric is one of samples that another run draws anew."""
        return self.is_random and metric.startswith("val_")

    def __getitem__(self, index: int) -> Any:
        return self.draw(torch.default_generator) if self.is_random else self.samples[index]


@dataclass
class Seen:
    """A run, as one rank has seen it.

    Attributes:
        built: Parameters and buffers that the rank has drawn, before the run.
        start: Those at the first batch, as far as the rank had them.
        end: Those at the end of training.
        batches: Of the training.
        data_rank: Which share of the data the rank had.
        metrics: The last values of what was logged.
        error: Of the run; empty if there was none.
    """

    built: dict[str, Tensor]
    start: dict[str, Tensor]
    end: dict[str, Tensor]
    batches: list[Any]
    data_rank: int = 0
    metrics: dict[str, float] | None = None
    error: str = ""


class Notes(L.Callback):
    """Keeps the weights of the start and the batches."""

    def __init__(self) -> None:
        self.seen = Seen({}, {}, {}, [])

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.seen.batches:
            self.seen.start = held(pl_module)
        self.seen.batches.append(tree_map(_copied, batch))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.end = held(pl_module)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers of this rank, shards made whole."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {n: whole(t.detach()).clone() for n, t in named if not t.is_meta}


def has_batch_norm(module_name: str) -> bool:
    """Checks whether a module computes statistics of its batches."""
    modules = MODULES[module_name][0]().modules()
    return any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in modules)


def train(module_name: str, strategy_name: str, trainer_options: dict[str, Any]) -> Seen:
    """Trains a module on a worker, as the script of a newcomer."""
    # torch's advice on blocks that return views, which T5's do
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    strategy_class, options, devices = STRATEGIES[strategy_name]
    torch.manual_seed(1000 + int(os.environ["RANK"]))  # not what the others have, as unseeded
    notes = Notes()
    try:
        fit(module_name, strategy_class(**options), devices, notes, trainer_options)
    except Exception as error:
        notes.seen.error = f"{type(error).__name__}: {error}"
    return notes.seen


def fit(
    module_name: str, strategy: Any, devices: int, notes: Notes, trainer_options: dict[str, Any]
) -> None:
    build, sample = MODULES[module_name]
    module = build().double()
    notes.seen.built = held(module)
    data = Samples(sample, is_random=module_name == RANDOM)
    trainer = make_trainer(devices=devices, strategy=strategy, callbacks=[notes], **trainer_options)
    loaders = {"train_dataloaders": DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)}
    if is_overridden("validation_step", module):
        loaders["val_dataloaders"] = DataLoader(data, batch_size=BATCH_SIZE)
    trainer.fit(module, **loaders)
    notes.seen.metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    notes.seen.data_rank = int(trainer.strategy.distributed_sampler_kwargs["rank"])


def make_trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        accelerator="cpu", max_epochs=NUM_EPOCHS, enable_model_summary=False, **quiet, **options
    )


def compare(module_name: str, ranks: list[Seen]) -> float:
    """Returns the largest difference from one device, relative to the largest element.

    Metrics are compared where there is one data replica; several log the values of their own share.

    Args:
        module_name: What was trained.
        ranks: All ranks of the run.
    """
    build, sample = MODULES[module_name]
    assert not any(_are_equal(ranks[0].built, other.built) for other in ranks[1:])
    module = build().double()
    start, data = joined([rank.start for rank in ranks]), Samples(sample, module_name == RANDOM)
    module.load_state_dict({name: start[name] for name in module.state_dict()})
    shares = {rank.data_rank: rank.batches for rank in ranks}
    for rank in ranks:
        assert _are_equal(rank.batches, shares[rank.data_rank]), "ranks of a replica differ"
    batches = [_joined_batch(parts) for parts in zip(*shares.values(), strict=True)]
    num_batches, rest = divmod(len(batches), NUM_EPOCHS)
    assert rest == 0
    for epoch in range(NUM_EPOCHS):
        check_epoch(data, batches[epoch * num_batches :][:num_batches])
    trainer = make_trainer(devices=1)
    loaders = {"train_dataloaders": Epochs(batches, num_batches)}
    if is_overridden("validation_step", module):
        loaders["val_dataloaders"] = DataLoader(data, batch_size=BATCH_SIZE)
    trainer.fit(module, **loaders)
    wanted, found = held(module), joined([rank.end for rank in ranks])
    assert wanted.keys() == found.keys()
    differences = [_difference(found[name], wanted[name]) for name in wanted]
    if len(shares) == 1:
        logged = {n: v for n, v in trainer.callback_metrics.items() if not data.draws(n)}
        check_metrics(logged, ranks)
    return float(torch.tensor(differences).max())  # NaN if one of them is


def check_metrics(wanted: dict[str, Tensor], ranks: list[Seen]) -> None:
    """Checks that all ranks have the metrics of one device.

    Args:
        wanted: One device's.
        ranks: All ranks of the run.
    """
    for name, value in wanted.items():
        found = torch.tensor([rank.metrics[name] for rank in ranks], dtype=value.dtype)
        # models of transformers compute their loss in float32
        tolerance = TOLERANCE if value.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(found, value.expand(len(ranks)), rtol=tolerance, atol=tolerance)


def check_epoch(data: Samples, batches: list[Any]) -> None:
    """Checks that an epoch had each sample once; of random ones, as many and no two the same.

    Args:
        data: The data set.
        batches: Of all replicas together.
    """
    rows = [_row(sample) for batch in batches for sample in _samples_of(batch)]
    if data.is_random:
        assert len({*rows}) == NUM_SAMPLES == len(rows)
    else:
        assert sorted(rows) == sorted(map(_row, data.samples))


class Epochs:
    """Batches in the order in which they were seen, some for each epoch."""

    def __init__(self, batches: list[Any], num_batches: int) -> None:
        self.batches = iter(batches)
        self.num_batches = num_batches

    def __iter__(self) -> Any:
        for _ in range(self.num_batches):
            yield next(self.batches)

    def __len__(self) -> int:
        return self.num_batches


def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns all tensors of a model, of which each rank has a part; copies must be equal."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            assert torch.equal(found.setdefault(name, tensor), tensor), name
    return found


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else copy.copy(leaf)


def _are_equal(one: Any, other: Any) -> bool:
    leaves, form = tree_flatten(one)
    others, other_form = tree_flatten(other)
    return form == other_form and all(map(torch.equal, leaves, others))


def _samples_of(batch: Any) -> list[Any]:
    leaves, form = tree_flatten(batch)
    return [tree_unflatten(row, form) for row in zip(*leaves, strict=True)]


def _row(sample: Any) -> tuple[float, ...]:
    """Returns the numbers of a sample, in an order that does not depend on its containers."""
    leaves = [torch.as_tensor(leaf, dtype=torch.float64) for leaf in tree_flatten(sample)[0]]
    return tuple(torch.cat([leaf.flatten() for leaf in leaves]).tolist())


def _joined_batch(parts: tuple[Any, ...]) -> Any:
    return tree_map(lambda *leaves: torch.cat(leaves), *parts)


def _difference(found: Tensor, wanted: Tensor) -> float:
    if not wanted.is_floating_point():
        return float((found != wanted).any())
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
