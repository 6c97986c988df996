"""Runs a module as a newcomer would, and compares it with one device.

A run has no seed: each process draws weights and data of its own, as it does in a script without
``seed_everything``. What the ranks held at the first batch, and which batches they saw, is noted;
one device then starts from those weights and trains on those batches, joined over replicas.
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
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.shards import whole
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


class Samples(Dataset[Any]):
    """The same samples in each process; or new ones at each look, drawn without a seed."""

    def __init__(self, sample: Sample, is_random: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.samples = [sample(generator) for _ in range(NUM_SAMPLES)]
        self.draw = sample
        self.is_random = is_random

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.draw(torch.default_generator) if self.is_random else self.samples[index]


@dataclass
class Seen:
    """What one rank tells of a run.

    Attributes:
        start: Parameters and buffers at the first batch, as far as this rank had them.
        end: At the end of training.
        batches: That it trained on.
        data_rank: Which share of the data it had.
        metrics: Logged last.
        error: Of the run; empty if there was none.
    """

    start: dict[str, Tensor]
    end: dict[str, Tensor]
    batches: list[Any]
    data_rank: int = 0
    metrics: dict[str, float] | None = None
    error: str = ""


class Notes(L.Callback):
    """Keeps the weights of the start and the batches."""

    def __init__(self) -> None:
        self.seen = Seen({}, {}, [])

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self.seen.batches:
            self.seen.start = held(pl_module)
        self.seen.batches.append(tree_map(_copied, batch))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.end = held(pl_module)


def held(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of this rank, shards made whole."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {n: whole(t.detach()).clone() for n, t in named if not t.is_meta}


def has_batch_norm(module_name: str) -> bool:
    """Whether a module computes statistics of its batches."""
    modules = MODULES[module_name][0]().modules()
    return any(isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) for module in modules)


def train(module_name: str, strategy_name: str, trainer_options: dict[str, Any]) -> Seen:
    """Trains on a worker; the script of a newcomer."""
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
    data = Samples(sample, is_random=module_name == "random data")
    trainer = make_trainer(devices=devices, strategy=strategy, callbacks=[notes], **trainer_options)
    loaders = {"train_dataloaders": DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)}
    if is_overridden("validation_step", module):
        loaders["val_dataloaders"] = DataLoader(data, batch_size=BATCH_SIZE)
    trainer.fit(module, **loaders)
    notes.seen.metrics = {n: float(v) for n, v in trainer.callback_metrics.items()}
    notes.seen.data_rank = int(trainer.strategy.distributed_sampler_kwargs["rank"])


def make_trainer(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(accelerator="cpu", max_epochs=2, enable_model_summary=False, **quiet, **options)


def compare(module_name: str, ranks: list[Seen]) -> float:
    """Gives the largest difference from one device, relative to the largest element.

    Args:
        module_name: What was trained.
        ranks: What all ranks have seen.
    """
    build, _ = MODULES[module_name]
    module = build().double()
    start = joined([rank.start for rank in ranks])
    module.load_state_dict({name: start[name] for name in module.state_dict()})
    shares = {rank.data_rank: rank.batches for rank in ranks}
    batches = [_joined_batch(parts) for parts in zip(*shares.values(), strict=True)]
    num_batches = len(batches) // 2
    trainer = make_trainer(devices=1)
    trainer.fit(module, DataLoader(Epochs(batches, num_batches), batch_size=None))
    wanted, found = held(module), joined([rank.end for rank in ranks])
    assert wanted.keys() == found.keys()
    return max(_difference(found[name], wanted[name]) for name in wanted)


class Epochs(torch.utils.data.IterableDataset[Any]):
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
    """All tensors of a model, which ranks have in part; copies must be equal."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, tensor in part.items():
            copy_of = found.setdefault(name, tensor)
            assert copy_of.shape == tensor.shape, name
    return found


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else copy.copy(leaf)


def _joined_batch(parts: tuple[Any, ...]) -> Any:
    return tree_map(lambda *leaves: torch.cat(leaves), *parts)


def _difference(found: Tensor, wanted: Tensor) -> float:
    if not wanted.is_floating_point():
        return float((found != wanted).any())
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))
