"""Lightning's callbacks that freeze, thaw and average do what they do on a single device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_dist import (
    DDPStrategy,
    HogwildStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
)
from tests.helpers.networks.models import (
    Classifier,
    ConvLayer,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, assert_close, loaders_of, trainer_of
from tests.integration.conformance.strategies import ENTRIES, Entry


def _half_again(epoch: int) -> float:
    return 1.5


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "finetuning": lambda: BackboneFinetuning(1, _half_again, verbose=True),
    "ema": lambda: EMAWeightAveraging(decay=0.9),
    "averaging": WeightAveraging,
    "swa": lambda: StochasticWeightAveraging(0.02, swa_epoch_start=1, annealing_epochs=2),
}


class Tuned(Classifier):
    """Trains a head at first, and later what is before it too."""

    def __init__(self, tunes: bool) -> None:
        super().__init__(depth=0)
        self.tunes = tunes
        self.backbone = nn.Sequential(ConvLayer(), ConvLayer())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.model(self.backbone(x)), y)
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        scores = self.model(self.backbone(x))
        self.log("val_loss", F.cross_entropy(scores, y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        trained = self.model if self.tunes else self
        return make_optimizer("sgd", trained.parameters())


def fit(name: str | None, callback: str, path: str, resumes: bool) -> tuple[dict[str, Tensor], Any]:
    """Trains for two epochs and saves, or goes on from there for two more."""
    module = make_module(Tuned, tunes=callback == "finetuning")
    made = CALLBACKS[callback]()
    trainer, entry = trainer_of(name, max_epochs=4 if resumes else 2, callbacks=[made])
    loaders = loaders_of(trainer, entry)
    trainer.fit(module, *loaders, ckpt_path=path if resumes else None, weights_only=False)
    if not resumes:
        trainer.save_checkpoint(path)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return state_of(module), metrics


class Backboned(Synced):
    """What the finetuning asks for, where a plan or a sequence is for all layers."""

    @property
    def backbone(self) -> nn.Module:
        return self.model[0]

    def configure_optimizers(self) -> Any:
        return make_optimizer("sgd", (p for p in self.parameters() if p.requires_grad))


STRATEGIES = {
    **ENTRIES,
    "pipedream-2": Entry(2, 1, partial(PipelineStrategy, schedule="pipedream")),
}
REFUSED = {
    "pipeline-gpipe-2": (4, "BackboneFinetuning adds a parameter group"),
    "pipedream-2": (4, "BackboneFinetuning adds a parameter group"),
    "pp-2-shard-2": (4, "BackboneFinetuning adds a parameter group"),
    "fsdp-2": (3, ""),
    "tp-2": (4, "BackboneFinetuning adds a parameter group"),
}
"""By strategy, how many of the callbacks, and in which words that which does not copy a model."""


def attempt_each(name: str) -> dict[str, str]:
    found = {}
    for callback, make in CALLBACKS.items():
        entry = STRATEGIES[name]
        trainer = make_trainer(
            devices=entry.devices, strategy=entry.make(), callbacks=[make()], max_epochs=2
        )
        try:
            trainer.fit(make_module(Backboned), *loaders_of(trainer, entry))
        except ValueError as error:
            found[callback] = str(error)
    return found


@pytest.mark.some("fsdp-2", "pipedream-2")
@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_alike_on_each_rank(workers: WorkerPool, name: str) -> None:
    count, words = REFUSED[name]
    first, *others = workers.run(STRATEGIES[name].devices, attempt_each, name, timeout=120.0)
    assert all(other == first for other in others)
    assert len(first) == count
    copying = [message for callback, message in first.items() if callback != "finetuning"]
    assert all("Use `lightning_dist.callbacks.ShardedWeightAveraging`" in m for m in copying)
    assert words in first.get("finetuning", "")


def fit_each(name: str | None, path: str) -> dict[str, Any]:
    return {
        f"{callback}-{resumes}": fit(name, callback, f"{path}/{callback}.ckpt", resumes)
        for callback in CALLBACKS
        for resumes in (False, True)
    }


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        return fit_each(None, str(tmp_path_factory.mktemp("single")))


@pytest.fixture(scope="module")
def replicas(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return workers.run(2, fit_each, "ddp-2", str(tmp_path_factory.mktemp("ddp")), timeout=150.0)


@pytest.mark.parametrize("callback", CALLBACKS)
def test_replicas_equal_a_single_device(
    replicas: list[dict[str, Any]], expected: dict[str, Any], callback: str
) -> None:
    for run in (f"{callback}-{resumes}" for resumes in (False, True)):
        for rank in replicas:
            assert_close(rank[run][0], expected[run][0])
            assert rank[run][1] == pytest.approx(expected[run][1], abs=1e-12)


def fit_shards(path: str) -> list[tuple[dict[str, Tensor], Any]]:
    return [fit("fsdp-2", "finetuning", f"{path}/last.ckpt", resumes) for resumes in (False, True)]


def test_shards_are_tuned_as_on_a_single_device(
    workers: WorkerPool, expected: dict[str, Any], tmp_path: Path
) -> None:
    """A group that was added to the optimizer is saved, and found again."""
    for rank in workers.run(2, fit_shards, str(tmp_path), timeout=120.0):
        for resumes, (state, metrics) in zip((False, True), rank, strict=True):
            assert_close(state, expected[f"finetuning-{resumes}"][0])
            assert metrics == pytest.approx(expected[f"finetuning-{resumes}"][1], abs=1e-12)


APART: dict[str, Callable[[], Strategy]] = {
    "local": partial(DDPStrategy, sync_every=4),
    "server": partial(ParameterServerStrategy, "async"),
    "hogwild": HogwildStrategy,
}


def average_apart(name: str) -> dict[str, str]:
    found = {}
    for callback in ("ema", "averaging", "swa"):
        trainer = make_trainer(
            devices=2, strategy=APART[name](), callbacks=[CALLBACKS[callback]()], max_epochs=3
        )
        module = make_module(Synced)
        try:
            trainer.fit(module, make_loader(16), make_loader(8))
            found[callback] = str({n: float(p.sum()) for n, p in state_of(module).items()})
        except ValueError as error:
            found[callback] = str(error)
    return found


@pytest.mark.some("local", "server")
@pytest.mark.parametrize("name", APART)
def test_averages_of_ranks_that_step_apart_are_refused(workers: WorkerPool, name: str) -> None:
    first, second = workers.run(2, average_apart, name)
    assert first == second
    for callback in ("ema", "averaging"):
        assert "under this strategy ranks step apart" in first[callback]
    # The other one averages at ends of epochs, where servers and shared weights are the same.
    assert ("ranks step apart" in first["swa"]) == (name == "local")


def test_one_rank_has_no_other_average(workers: WorkerPool, expected: dict[str, Any]) -> None:
    (found,) = workers.run(1, fit_alone)
    assert_close(found, expected["ema-False"][0])


def fit_alone() -> dict[str, Tensor]:
    module = make_module(Tuned, tunes=False)
    trainer = make_trainer(
        devices=1,
        strategy=DDPStrategy(sync_every=4),
        callbacks=[CALLBACKS["ema"]()],
        max_epochs=2,
    )
    trainer.fit(module, *loaders_of(trainer, None))
    return state_of(module)


def rates_warned_of(strategy: Strategy) -> list[str]:
    module = make_module()
    module.flops_per_batch = 1
    monitor = ThroughputMonitor(len)
    trainer = make_trainer(devices=2, strategy=strategy, max_epochs=1, callbacks=[monitor])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, make_loader(8), make_loader(8))
    return [str(warning.message) for warning in caught if "ThroughputMonitor" in str(warning)]


def test_rates_that_count_a_sample_on_each_stage_are_warned_of(workers: WorkerPool) -> None:
    (text,), _ = workers.run(2, rates_warned_of, PipelineStrategy())
    assert "2 ranks have those of 1 data replica. So its rates are 2 times the true ones" in text
    assert workers.run(2, rates_warned_of, DDPStrategy()) == [[], []]
