"""A class token, positions and a gain that a model with blocks holds itself; sequences in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.parallelize.shard_config import ShardConfig
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
from tests.integration.pipeline.parity import beside_common as common
from tests.integration.pipeline.parity.beside_common import (
    CUT,
    UPDATES,
    State,
    fit_half,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + x.mean(dim=1, keepdim=True)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Linear(6, 6)
        self.token = nn.Parameter(torch.full((1, 1, 6), 0.1))
        self.places = nn.Parameter(torch.full((1, 3, 6), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1)
        return x + self.places


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x[:, 0]) * self.gain)


class FirstBlock(nn.Module):
    def __init__(self, first: First, block: Block) -> None:
        super().__init__()
        self.first, self.block = first, block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.first(x))


class LastBlock(nn.Module):
    def __init__(self, block: Block, last: Last) -> None:
        super().__init__()
        self.block, self.last = block, last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(x))


class InLayers(Classifier):
    """Has them in its first layer, and in its last one."""

    def __init__(self) -> None:
        super().__init__()
        first, blocks, last = First(), [Block() for _ in range(6)], Last()
        ends = FirstBlock(first, blocks[0]), LastBlock(blocks[-1], last)
        self.model: nn.Module = nn.Sequential(ends[0], *blocks[1:-1], ends[1])

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        vectors = [p for p in named.values() if p.dim() != 2]
        matrices = [p for p in named.values() if p.dim() == 2]
        groups = [{"params": matrices}, {"params": vectors, "lr": 0.02, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)

    def logits(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.logits(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss


class Vision(nn.Module):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        first, last = layers[0].first, layers[-1].last
        self.patches, self.token, self.places = first.patches, first.token, first.places
        self.norm, self.head, self.gain = last.norm, last.head, last.gain
        self.blocks: Any = nn.ModuleList([layers[0].block, *layers[1:-1], layers[-1].block])

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1)
        x = x + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]) * self.gain)


class Called(Vision):
    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__(layers)
        self.blocks = nn.Sequential(*self.blocks)

    def embed(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1) + self.places

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.embed(x))
        return self.head(self.norm(x[:, 0]) * self.gain)


class OfList(InLayers):
    def __init__(self) -> None:
        super().__init__()
        self.model = Vision(self.model)  # type: ignore[arg-type]


class OfSequence(InLayers):
    def __init__(self) -> None:
        super().__init__()
        self.model = Called(self.model)  # type: ignore[arg-type]


class Itself(InLayers):
    """Is the model, whose steps train a temperature, too; no trace takes `len` of a batch."""

    def __init__(self) -> None:
        super().__init__()
        own = Vision(self.model)  # type: ignore[arg-type]
        del self.model
        self.patches, self.token, self.places = own.patches, own.token, own.places
        self.temperature = nn.Parameter(torch.zeros(()))
        self.blocks, self.norm, self.head, self.gain = own.blocks, own.norm, own.head, own.gain

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patches(x)], dim=1)
        x = x + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]) * self.gain)  # type: ignore[no-any-return]

    def logits(self, x: Tensor) -> Tensor:
        return self(x) * self.temperature.exp()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.logits(batch[0]), batch[1]))


class Repeating(InLayers):
    """Runs each of three blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Called(self.model)  # type: ignore[arg-type]
        self.model.blocks = nn.Sequential(*self.model.blocks[:3], *self.model.blocks[:3])


def fit(class_: type[InLayers], devices: int, strategy: Any, **options: Any) -> State:
    module, resumed = make_module(class_), options.pop("resumed", None)
    saved = options.pop("saved", None)
    trainer = make_trainer(devices=devices, strategy=strategy, **{"max_epochs": 2, **options})
    loader = make_loader()
    place = trainer.strategy.distributed_sampler_kwargs if devices > 1 else {"num_replicas": 1}
    if place["num_replicas"] == 2:
        loader = share_of(place["rank"], 46)
    trainer.fit(module, loader, make_loader(16), ckpt_path=resumed)
    if saved is not None:
        trainer.save_checkpoint(saved)
    return state_of(module)


def renamed(name: str) -> str:
    """Returns the name in :class:`Vision` of a parameter of :class:`InLayers`."""
    name = name.replace("model.0.first.", "model.").replace("model.5.last.", "model.")
    for index in range(6):
        name = name.replace(f"model.{index}.", f"model.blocks.{index}.")
    return name.replace(".block.", ".")


def joined(ranks: list[State]) -> State:
    return {renamed(name): value for rank in ranks for name, value in rank.items()}


# --- schedules -----------------------------------------------------------------------------------

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zbv": {"schedule": "zbv"},
    "interleaved_1f1b": {"schedule": "interleaved_1f1b"},
    "pipedream": {"schedule": "pipedream"},
    "predict": {"schedule": "pipedream", "staleness_correction": "predict"},
    "pipedream_2bw": {"schedule": "pipedream_2bw"},
}


def fit_all(name: str) -> list[State]:
    cut = [1, 2, 2, 1] if name in ("zbv", "interleaved_1f1b") else [3, 3]
    return [
        fit(class_, 2, PipelineStrategy(partition=cut, **SCHEDULES[name]))
        for class_ in (InLayers, OfList, OfSequence)
    ]


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_layers_that_have_them(workers: WorkerPool, name: str) -> None:
    ranks = workers.run(2, fit_all, name)
    inside, listed, called = (joined([rank[kind] for rank in ranks]) for kind in range(3))
    assert_equal(listed, inside)
    assert_equal(called, inside)
    last = 0 if name == "zbv" else 1
    for kind in (1, 2):
        assert "model.token" in ranks[0][kind]
        assert "model.token" not in ranks[1][kind]
        assert ["model.gain" in rank[kind] for rank in ranks] == [last == 0, last == 1]


# --- layouts -------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], Any]] = {
    **common.LAYOUTS,
    "recomputed": lambda: MeshStrategy(
        pp=2, dp_shard=2, pipeline=CUT, shard=ShardConfig(activation_checkpointing="full")
    ),
    "tensor parallel": lambda: MeshStrategy(pp=2, tp=2, pipeline=CUT),
}


def fit_layout(name: str) -> list[State]:
    size = 2 if name == "stages" else 4
    kinds = (OfList, OfSequence, Itself)
    return [fit(class_, size, LAYOUTS[name](), **UPDATES) for class_ in kinds]


@pytest.mark.some("stages", "tensor parallel")
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_a_single_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ranks = workers.run(2 if name == "stages" else 4, fit_layout, name)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for kind, class_ in enumerate((OfList, OfSequence, Itself)):
        assert_equal(joined([rank[kind] for rank in ranks]), fit(class_, 1, "auto", **UPDATES))


def test_computes_in_half_precision_as_a_single_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = joined(workers.run(2, fit_half, OfList, 2))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit_half(OfList, 1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def fit_repeating() -> State:
    return fit(Repeating, 2, PipelineStrategy(num_microbatches=2))


def test_blocks_may_be_repeated(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = workers.run(2, fit_repeating)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit(Repeating, 1, "auto")
    found = joined(ranks)
    assert found.keys() >= expected.keys()  # a repeated block has two names
    assert_equal({name: found[name] for name in expected}, expected)


# --- checkpoints ---------------------------------------------------------------------------------


def fit_and_resume(root: str) -> State:
    """Trains an epoch, and one more behind a resume."""
    path = f"{root}/first.ckpt"
    fit(OfList, 2, PipelineStrategy(), max_epochs=1, saved=path)
    return fit(OfList, 2, PipelineStrategy(), resumed=path, saved=f"{root}/second.ckpt")


def test_resumes_from_checkpoints(
    workers: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = workers.run(2, fit_and_resume, str(tmp_path))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit(OfList, 1, "auto")
    assert_equal(joined(ranks), expected)
    assert_equal(load_full(tmp_path / "second.ckpt")["state_dict"], expected)
    torch.save(load_full(tmp_path / "first.ckpt"), tmp_path / "alone.ckpt")
    assert_equal(fit(OfList, 1, "auto", resumed=str(tmp_path / "alone.ckpt")), expected)
