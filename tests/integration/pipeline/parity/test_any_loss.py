"""Losses that are no means over samples, of texts of varying length, on replicas and stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.data_parallel.local_config import LocalConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.oracle import train_late
from tests.helpers.processes.workers import WorkerPool

WORDS, IGNORED = 7, -100
CLIP = 0.02
Batch = tuple[Tensor, Tensor]


def mean_over_words(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Words(L.LightningModule):
    """Says what its loss is a mean over; on one device nobody asks."""

    def __init__(self, weighs: bool = True) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(WORDS, 6), Block(), Block(), nn.Linear(6, WORDS))
        self.weighs = weighs
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        tokens, targets = batch
        loss = mean_over_words(self.model(tokens), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        count = (targets != IGNORED).sum().double()
        return {"loss": loss, "weight": count} if self.weighs else loss

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in outputs.items()})

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        tokens, targets = batch
        loss = mean_over_words(self.model(tokens), targets)
        self.log("val_loss", loss)
        return {"loss": loss, "weight": int((targets != IGNORED).sum())}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append({name: float(value) for name, value in outputs.items()})

    def configure_optimizers(self) -> Any:
        return make_optimizer("sgd", self.parameters())


def make_batches() -> list[Batch]:
    """Texts of three lengths, the last batch smaller; some have many words and some have few."""
    generator = torch.Generator().manual_seed(6)
    batches = []
    for rows, length in ((8, 5), (8, 3), (8, 7), (8, 3), (8, 5), (4, 2)):
        tokens = torch.randint(0, WORDS, (rows, length), generator=generator)
        shares = torch.linspace(0.9, 0.0, rows)[:, None]
        ignored = torch.rand(rows, length, generator=generator) < shares
        batches.append((tokens, tokens.flip(1).masked_fill(ignored, IGNORED)))
    return batches


def loader_of(batches: list[Batch]) -> DataLoader[Any]:
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


# --- one replica: what one device computes, logs and hands to hooks ------------------------------


def fit_words(devices: int) -> Any:
    module = make_module(Words)
    strategy: Any = PipelineStrategy(num_microbatches=4) if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, max_epochs=2)
    trainer.fit(module, loader_of(make_batches()), loader_of(make_batches()[1:3]))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return state_of(module), module.seen, metrics


def test_equals_a_single_device_unchanged(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = workers.run(2, fit_words, 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    state, seen, metrics = fit_words(1)
    found = {**ranks[0][0], **ranks[1][0]}
    for name, value in state.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    for _, known, logged in ranks:
        assert known == [pytest.approx(outputs, abs=1e-12) for outputs in seen]
        assert logged == pytest.approx(metrics, abs=1e-12)


# --- replicas ------------------------------------------------------------------------------------


class Each(nn.Module):
    """Runs batches of several lengths, as if they were one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: list[Tensor]) -> list[Tensor]:
        return [self.model(each) for each in tokens]


def mean_over_all(logits: list[Tensor], targets: list[Tensor]) -> Tensor:
    losses = [
        F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=IGNORED, reduction="sum")
        for x, y in zip(logits, targets, strict=True)
    ]
    return torch.stack(losses).sum() / sum((y != IGNORED).sum() for y in targets)


def undivided(accumulate: int = 1, clip: bool = False, ages: tuple[int, int] = (0, 0)) -> Any:
    """Trains on one device, each update on batches that are one; with ages of the two stages."""
    module = make_module(Words)
    batches = make_batches()
    groups = [batches[i : i + accumulate] for i in range(0, len(batches), accumulate)]

    def before_step(_: int) -> None:
        if clip:
            assert nn.utils.clip_grad_norm_(module.model.parameters(), CLIP) > CLIP

    train_late(
        Each(module.model),
        make_optimizer("sgd", module.model.parameters()),
        [([x for x, _ in group], [y for _, y in group]) for group in groups],
        mean_over_all,
        drains=(),
        before_step=before_step,
        staleness=lambda name: ages[int(name.split(".")[1]) > 1],
    )
    return state_of(module)


def pipeline(**options: Any) -> PipelineStrategy:
    return PipelineStrategy(partition="uniform", **{"num_stages": 2, **options})


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "1f1b": ({"num_microbatches": 2}, {"accumulate": 4, "clip": True}),
    "zbv": ({"num_stages": 4, "num_microbatches": 2}, {}),
    "pipedream": ({}, {"ages": (1, 0)}),
    "pipedream_2bw": ({"num_microbatches": 2}, {"ages": (1, 1), "clip": True}),
}


def fit_replicas() -> dict[str, Any]:
    strategies: dict[str, Any] = {
        schedule: pipeline(schedule=schedule, **options) for schedule, (options, _) in CASES.items()
    }
    strategies["mesh"] = MeshStrategy(pp=2, dp_shard=2, pipeline=PipelineConfig("1f1b", 2))
    strategies["warm-up"] = MeshStrategy(
        pp=2,
        dp_replicate=2,
        dp_shard=1,
        pipeline=PipelineConfig("1f1b", 2),
        local=LocalConfig(sync_every=4, sync_warmup_steps=1000),
    )
    states = {}
    for name, strategy in strategies.items():
        expected = CASES.get(name, CASES["1f1b"])[1]
        trainer = make_trainer(
            devices=4,
            strategy=strategy,
            accumulate_grad_batches=expected.get("accumulate", 1),
            gradient_clip_val=CLIP if "clip" in expected else None,
        )
        place = trainer.strategy.distributed_sampler_kwargs["rank"]
        # Of neighbours one has many words and the other few.
        share = [
            (x[place * len(x) // 2 :][: len(x) // 2], y[place * len(y) // 2 :][: len(y) // 2])
            for x, y in make_batches()
        ]
        module = make_module(Words)
        trainer.fit(module, loader_of(share), loader_of(share[:1]))
        states[name] = state_of(module)
    return states


def test_replicas_equal_the_undivided_batch(workers: WorkerPool) -> None:
    ranks = workers.run(4, fit_replicas)
    for case in ranks[0]:
        expected = undivided(**CASES.get(case, CASES["1f1b"])[1])
        found = {name: value for rank in ranks for name, value in rank[case].items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-12, msg=lambda m, c=case: f"{c}: {m}"
            )


def fit_disagreeing(rank_with: int, schedule: str) -> tuple[str, str]:
    trainer = make_trainer(devices=2, strategy=PipelineStrategy(num_stages=1, schedule=schedule))
    module = make_module(Words, weighs=trainer.global_rank == rank_with)
    try:
        trainer.fit(module, loader_of(make_batches()), loader_of(make_batches()[:1]))
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_replicas_of_which_one_has_no_weight_are_refused(workers: WorkerPool) -> None:
    for error, text in workers.run(2, fit_disagreeing, 1, "1f1b"):
        assert error == "ValueError", text
        assert "on each rank" in text


# --- running statistics --------------------------------------------------------------------------


class Counting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        norms = (nn.BatchNorm1d(2), nn.BatchNorm1d(2))
        self.model = nn.Sequential(
            ConvLayer(), norms[0], ConvLayer(), norms[1], nn.Flatten(), nn.Linear(12, 3)
        )


def count(path: str) -> Any:
    module = make_module(Counting)
    trainer = make_trainer(devices=4, strategy=pipeline(schedule="1f1b"))
    place = trainer.strategy.distributed_sampler_kwargs["rank"]
    trainer.fit(module, share_of(place, 32), make_loader(8))
    before = {name: value.clone() for name, value in module.named_buffers()}
    trainer.save_checkpoint(path)
    return before, float(trainer.callback_metrics["val_loss"])


def test_replicas_have_the_running_statistics_of_the_checkpoint(
    workers: WorkerPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "counted.ckpt")
    ranks = workers.run(4, count, path)
    saved = load_full(path)["state_dict"]
    for buffers, _ in ranks:
        assert len(buffers) == 3
        for name, value in buffers.items():
            assert torch.equal(value, saved[name])
    assert len({val_loss for _, val_loss in ranks}) == 1
