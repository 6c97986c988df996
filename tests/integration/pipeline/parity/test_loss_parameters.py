"""A head, a temperature and centres beside the model are trained as in its last layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
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


class Tail(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.zeros(()))
        self.centers = nn.Embedding(3, 12)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(z) * self.scale.exp(), distances(z, self.centers.weight)


def distances(z: Tensor, centers: Tensor) -> Tensor:
    return (z[:, None] - centers).square().mean(-1)


class Inside(Classifier):
    """Has them in its last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(ConvLayer() for _ in range(6)), nn.Flatten(), Tail())

    def tail(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits, far = self.tail(x)
        return F.cross_entropy(logits, y) + 0.1 * far.gather(1, y[:, None]).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        last = [p for name, p in named.items() if name.rpartition(".")[2] == "scale"]
        others = [p for name, p in named.items() if name.rpartition(".")[2] != "scale"]
        groups = [{"params": others}, {"params": last, "lr": 0.1, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.01)


class Beside(Inside):
    """Has them beside the model, in its steps."""

    def __init__(self) -> None:
        super().__init__()
        tail = self.model[7]
        del self.model[7]
        self.head, self.scale, self.centers = tail.head, tail.scale, tail.centers

    def tail(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale.exp()  # ahead of the model's call, as it may be
        z = self.model(x)
        return self.head(z) * scale, distances(z, self.centers.weight)


def fit(
    class_: type[L.LightningModule], devices: int, strategy: Any, **options: Any
) -> tuple[State, list[float]]:
    module = make_module(class_)
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2, **options)
    loader = make_loader()
    place = trainer.strategy.distributed_sampler_kwargs if devices > 1 else {"num_replicas": 1}
    if place["num_replicas"] == 2:
        loader = share_of(place["rank"], 46)
    trainer.fit(module, loader, make_loader(16))
    names = ("val_loss", "train_loss_epoch")
    return state_of(module), [float(trainer.callback_metrics[name]) for name in names]


def joined(ranks: list[State]) -> State:
    """Joins what ranks hold, under the names that they have beside the model."""
    return {name.replace("model.7.", ""): value for rank in ranks for name, value in rank.items()}


# --- schedules -----------------------------------------------------------------------------------

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "zb_h1": {"schedule": "zb_h1"},
    "zbv": {"schedule": "zbv"},
    "interleaved_1f1b": {"schedule": "interleaved_1f1b"},
    "pipedream": {"schedule": "pipedream"},
    "vertical_sync": {"schedule": "pipedream", "weight_versions": "vertical_sync"},
    "newest": {"schedule": "pipedream", "weight_versions": "none"},
    "predict": {"schedule": "pipedream", "staleness_correction": "predict"},
    "pipedream_2bw": {"schedule": "pipedream_2bw"},
    "pipedream_2bw, predict": {"schedule": "pipedream_2bw", "staleness_correction": "predict"},
}
OF_A_V = ("zbv", "interleaved_1f1b")  # two stages on a rank


def fit_both(name: str) -> list[tuple[State, list[float]]]:
    cuts = ([2, 2, 2, 2], [2, 2, 2, 1]) if name in OF_A_V else ([4, 4], [4, 3])
    return [
        fit(class_, 2, PipelineStrategy(partition=cut, **SCHEDULES[name]))
        for class_, cut in zip((Inside, Beside), cuts, strict=True)
    ]


@pytest.mark.some("pipedream_2bw, predict", "zbv")
@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_a_last_layer_that_has_them(workers: WorkerPool, name: str) -> None:
    ranks = workers.run(2, fit_both, name)
    inside, beside = (joined([rank[kind][0] for rank in ranks]) for kind in (0, 1))
    assert_equal(beside, inside)
    assert all(rank[0][1] == pytest.approx(rank[1][1], abs=1e-12) for rank in ranks)
    assert "scale" in ranks[0 if name == "zbv" else 1][1][0]
    assert "scale" not in ranks[1 if name == "zbv" else 0][1][0]


# --- layouts -------------------------------------------------------------------------------------

PLAN = {"model.*.linear": "colwise_gather"}
LAYOUTS: dict[str, Callable[[], Any]] = {
    **common.LAYOUTS,
    "replicas of a mesh": lambda: MeshStrategy(pp=2, dp_replicate=2, pipeline=CUT),
    "tensor parallel": lambda: MeshStrategy(
        pp=2, tp=2, pipeline=CUT, tensor=TensorConfig(plan=PLAN)
    ),
}


def fit_layout(name: str) -> tuple[State, list[float]]:
    return fit(Beside, 2 if name == "stages" else 4, LAYOUTS[name](), **UPDATES)


@pytest.mark.some("stages")
@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_a_single_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    ranks = workers.run(2 if name == "stages" else 4, fit_layout, name)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected, metrics = fit(Beside, 1, "auto", **UPDATES)
    assert_equal(joined([state for state, _ in ranks]), expected)
    assert all(logged[0] == pytest.approx(metrics[0], abs=1e-12) for _, logged in ranks)


def test_computes_in_half_precision_as_a_single_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = joined(workers.run(2, fit_half, Beside, 2))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit_half(Beside, 1)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def fit_half_on_a_mesh() -> list[State]:
    states = []
    for axis in ("dp_shard", "dp_replicate"):
        strategy = MeshStrategy(pp=2, pipeline=PipelineConfig("1f1b", 2), **{axis: 2})
        module, half = make_module(Beside).float(), [MixedPrecision("bf16")]
        trainer = make_trainer(devices=4, strategy=strategy, callbacks=half)
        rank = trainer.strategy.distributed_sampler_kwargs["rank"]
        batches: Any = [(x.float(), y) for x, y in share_of(rank, 46)]
        loader = DataLoader(batches, batch_size=None)
        trainer.fit(module, loader, loader)
        states.append(state_of(module))
    return states


@pytest.mark.long
def test_stages_have_them_in_single_precision_on_shards_too(workers: WorkerPool) -> None:
    ranks = workers.run(4, fit_half_on_a_mesh)
    assert any("scale" in sharded for sharded, _ in ranks)
    for sharded, replicated in ranks:
        assert sharded.keys() == replicated.keys()
        assert all(torch.equal(sharded[name], value) for name, value in replicated.items())


# --- models --------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(ConvLayer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x.flatten(1)


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.third(self.second(h) + h).flatten(1)


class OfBlocks(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.model = Chain()


class Traced(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.model = Skip()
        self.centers = nn.Embedding(3, 12)


class Outer(nn.Module):
    """Has a parameter of its own, and calls the pipelined module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.gain = nn.Parameter(torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.gain


class Nested(Beside):
    def __init__(self) -> None:
        super().__init__()
        self.model = Outer(self.model)


class WithForward(Beside):
    """Its steps do not call the forward that mentions everything, so no trace can be made."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(x)[0]


MODELS: dict[str, tuple[type[Beside], str]] = {
    "blocks": (OfBlocks, "auto"),
    "traced": (Traced, "auto"),
    "trace": (Beside, "trace"),
    "nested": (Nested, "model.inner"),
    "forward": (WithForward, "auto"),
}


def fit_models() -> dict[str, State]:
    return {
        name: fit(class_, 2, PipelineStrategy(layers=layers))[0]
        for name, (class_, layers) in MODELS.items()
    }


def test_whatever_the_model_is(workers: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = workers.run(2, fit_models)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, (class_, _) in MODELS.items():
        assert_equal(joined([rank[name] for rank in ranks]), fit(class_, 1, "auto")[0])


# --- checkpoints, later runs and moves -----------------------------------------------------------


class Moves(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.strategy.repartition([2, 5])


def go_on(
    devices: int, schedule: str, epochs: int, source: str | None, target: str, partition: list[int]
) -> State:
    strategy: Any = "auto"
    if devices > 1:
        strategy = PipelineStrategy(schedule=schedule, partition=partition)
    module = make_module(Beside)
    callbacks = [Moves()] if partition == [4, 3] else []
    for last in (epochs - 1, epochs) if source is None else (epochs,):  # two runs of a module
        trainer = make_trainer(
            devices=devices, strategy=strategy, max_epochs=last, callbacks=callbacks
        )
        trainer.fit(module, make_loader(), make_loader(8), ckpt_path=source)
        strategy = (
            strategy if devices == 1 else PipelineStrategy(schedule=schedule, partition=[2, 5])
        )
        source = source or f"{target}-on-the-way"
        trainer.save_checkpoint(source if last < epochs else target)
    return state_of(module)


def test_goes_on_with_other_stages(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = [str(tmp_path / name) for name in "abc"]
    workers.run(2, go_on, 2, "1f1b", 2, None, paths[0], [4, 3])
    workers.run(3, go_on, 3, "zb_h1", 3, paths[0], paths[1], [2, 2, 3])
    ranks = workers.run(2, go_on, 2, "zbv", 4, paths[1], paths[2], [2, 2, 2, 1])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    module = make_module(Beside)
    trainer = make_trainer(max_epochs=4)
    trainer.fit(module, make_loader(), make_loader(8))
    assert_equal(joined(ranks), state_of(module))
    assert_equal(load_full(paths[2])["state_dict"], state_of(module))


# --- mistakes ------------------------------------------------------------------------------------


class Ahead(Beside):
    def tail(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().tail(x * self.scale.exp())


class Decides(Beside):
    def tail(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().tail(x * 2 if self.scale > 1 else x)


class InAHook(Beside):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1:
            raise RuntimeError("It would wait for the other rank's hook.")
        self.scale.exp()


class CallsInAHook(Beside):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_rank == 1:
            raise RuntimeError("It would wait for the other rank's hook.")
        self.head(torch.zeros(1, 12).double())


MISTAKES: dict[str, tuple[type[Beside], dict[str, Any], str]] = {
    "ahead": (Ahead, {}, "scale ahead of the pipelined module. Trainable parameters"),
    "ahead, on the last stage's rank": (
        Ahead,
        {"schedule": "zbv"},
        "ahead of the pipelined module",
    ),
    "a decision": (Decides, {}, "scale ahead of the pipelined module"),
    "in a hook": (InAHook, {}, "'scale'] are None on this rank"),
    "a call in a hook": (CallsInAHook, {}, "'head' was called on a rank without its parameters"),
}


def attempt(name: str) -> str:
    class_, options, _ = MISTAKES[name]
    try:
        fit(class_, 2, PipelineStrategy(**options), limit_train_batches=2)
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return "nothing"


@pytest.mark.parametrize("name", MISTAKES)
def test_says_where_they_may_be_used(workers: WorkerPool, name: str) -> None:
    assert MISTAKES[name][2] in workers.run(2, attempt, name)[0]
