"""Ranks of a data replica have the batches that one device would have, whatever is drawn where."""

from __future__ import annotations

import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_dist import MeshStrategy, PipelineStrategy, TensorParallelStrategy
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.helpers.networks.models import (
    make_data,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, assert_close, joined
from tests.integration.conformance.strategies import HALVES, PLAN

NUM_SAMPLES = 24
BATCH_SIZE = 4

MESH = partial(MeshStrategy, pp=2, pipeline=HALVES)
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "1f1b": (2, lambda: PipelineStrategy(num_microbatches=2)),
    "pipedream": (3, lambda: PipelineStrategy(schedule="pipedream")),
    "tp": (2, lambda: TensorParallelStrategy(plan=PLAN)),
    "pp-tp": (4, lambda: MESH(tp=2, tensor=TensorConfig(plan=PLAN))),
    "pp-replicate": (4, lambda: MESH(dp_replicate=2, dp_shard=1)),
    "pipeline-2x2": (4, lambda: PipelineStrategy(num_stages=2)),
}


def seed_this_process() -> None:
    """Leaves the generators as in unseeded processes; the first rank's are one device's."""
    seed = int(os.environ.get("RANK", "0"))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Is drawn at random, and augments with each generator; counts what is read."""

    def __init__(self, size: int = NUM_SAMPLES) -> None:
        self.x = torch.rand(size, 2, 6, dtype=torch.float64)
        self.y = torch.randint(0, 3, (size,))
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        self.num_read += 1
        noise = random.random() + np.random.rand() + float(torch.rand(()))
        return self.x[index] + noise, self.y[index]


class Watching(L.Callback):
    """Keeps the batches, as they are when steps begin; draws on one rank alone."""

    def __init__(self) -> None:
        self.batches: dict[str, list[Tensor]] = {}

    def keep(self, stage: str, batch: Any) -> None:
        if isinstance(batch, dict):
            batch = next(iter(batch.values()))
        self.batches.setdefault(stage, []).append(batch[0].clone())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.keep("train", batch)
        if trainer.is_global_zero:
            torch.rand(3)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.keep("sanity" if trainer.sanity_checking else "validate", batch)

    def on_test_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.keep("test", batch)

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.keep("predict", batch)


class Drawing(Synced):
    """Draws its data in hooks, and changes batches on their way in place."""

    def __init__(self) -> None:
        super().__init__()
        self.data: list[Noisy] = []

    def loader(self, **options: Any) -> DataLoader[Any]:
        self.data.append(Noisy())
        return DataLoader(self.data[-1], batch_size=BATCH_SIZE, **options)

    def train_dataloader(self) -> DataLoader[Any]:
        return self.loader(shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return self.loader()

    def test_dataloader(self) -> DataLoader[Any]:
        return self.loader()

    def predict_dataloader(self) -> DataLoader[Any]:
        return self.loader()

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].mul_(torch.rand(()))
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch[0].add_(random.random() + np.random.rand())
        return batch


def run_all(name: str | None) -> Any:
    module, watching = make_module(Drawing), Watching()
    devices, make = STRATEGIES[name] if name else (1, lambda: "auto")
    trainer = make_trainer(
        devices=devices,
        strategy=make(),
        max_epochs=2,
        num_sanity_val_steps=2,
        reload_dataloaders_every_n_epochs=1,
        callbacks=[watching],
        use_distributed_sampler=True,
    )
    seed_this_process()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*DistributedSampler.*")
        trainer.fit(module)
        state = state_of(module)
        (validated,) = trainer.validate(module, verbose=False)
        (tested,) = trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
    assert predicted is not None
    num_read = sum(data.num_read for data in module.data)
    return watching.batches, state, {**validated, **tested}, torch.cat(list(predicted)), num_read


def assert_same(found: dict[str, list[Tensor]], expected: dict[str, list[Tensor]]) -> None:
    assert found.keys() == expected.keys()
    for stage, batches in expected.items():
        assert len(found[stage]) == len(batches), stage
        assert all(map(torch.equal, found[stage], batches)), stage


@pytest.mark.parametrize("name", ["1f1b", "pipedream", "tp", "pp-tp"])
def test_a_script_that_nobody_seeded_is_as_on_one_device(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    batches, state, metrics, predictions, num_read = run_all(None)
    ranks = workers.run(STRATEGIES[name][0], run_all, name, timeout=120.0)
    for found, _, measured, predicted, _ in ranks:
        assert_same(found, batches)
        if name != "pipedream":  # has trained otherwise
            assert measured == pytest.approx(metrics, abs=1e-12)
            assert float((predicted - predictions).abs().max()) < 1e-12
    if name != "pipedream":
        assert_close(joined([rank[1] for rank in ranks]), state)
    assert [rank[-1] for rank in ranks] == [num_read] + [0] * (len(ranks) - 1)


@pytest.mark.parametrize("name", ["pp-replicate", "pipeline-2x2"])
def test_each_replica_has_batches_of_its_own(workers: WorkerPool, name: str) -> None:
    first, second, third, fourth = workers.run(4, run_all, name, timeout=120.0)
    for one, other in ((first, third), (second, fourth)):  # the mesh is pp x dp
        assert_same(one[0], other[0])
        assert one[-1] > other[-1] == 0
    for stage, batches in first[0].items():
        assert not any(map(torch.equal, batches, second[0][stage])), stage


class ByRank(Sampler[int]):
    """A user's sampler that shuffles on its own."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        rank = int(os.environ.get("RANK", "0"))
        return iter(torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(rank)))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = Noisy()
        while True:
            yield data[random.randrange(NUM_SAMPLES)]


class Listed:
    """An iterable of two batches that may say that there are more."""

    def __init__(self, length: int = 2) -> None:
        self.data = Noisy()
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return (self.data[begin : begin + BATCH_SIZE] for begin in (0, BATCH_SIZE))

    def __len__(self) -> int:
        return self.length


class Leaving(L.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> Any:
        return -1 if batch_idx == 2 else None


class Peeking(L.Callback):
    """Reads the Trainer's loader by itself, on one rank."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        if trainer.is_global_zero:
            next(iter(trainer.train_dataloader))


def shuffled(**options: Any) -> DataLoader[Any]:
    if options.get("num_workers"):
        # The processes that the tests run in were spawned, and would spawn in their turn.
        options["multiprocessing_context"] = "fork"
    return DataLoader(Noisy(), **{"batch_size": BATCH_SIZE, "shuffle": True, **options})


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffles by rank": (lambda: shuffled(sampler=ByRank(), shuffle=None), {}),
    "workers": (lambda: shuffled(num_workers=2, persistent_workers=True), {}),
    "endless": (lambda: DataLoader(Endless(), BATCH_SIZE), {"limit_train_batches": 3}),
    "iterable": (Listed, {}),
    "lying": (lambda: Listed(4), {}),
    "overfit": (shuffled, {"overfit_batches": 2}),
    "limited": (shuffled, {"limit_train_batches": 2, "val_check_interval": 1}),
    "left": (shuffled, {"callbacks": [Leaving()]}),
    "peeking": (shuffled, {"callbacks": [Peeking()]}),
    "several": (lambda: {"a": shuffled(), "b": Listed()}, {}),
    "shortest": (lambda: CombinedLoader({"a": shuffled(), "b": Listed()}, "min_size"), {}),
}


class OfFirst(Synced):
    """Trains on the first of several batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch["a"] if isinstance(batch, dict) else batch
        return super().training_step(batch, batch_idx)


def fit_cases(devices: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (make, options) in CASES.items():
        watching, module = Watching(), make_module(OfFirst)
        strategy = PipelineStrategy(num_microbatches=2) if devices > 1 else "auto"
        options = {"max_epochs": 2, **options}
        callbacks = [watching, *options.pop("callbacks", [])]
        trainer = make_trainer(devices=devices, strategy=strategy, callbacks=callbacks, **options)
        seed_this_process()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*(overfit|persistent_workers).*")
            trainer.fit(module, make(), shuffled(shuffle=False))
        found[name] = watching.batches
    return found


def test_loaders_of_all_kinds_give_what_they_give_on_one_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    expected = workers.run(1, fit_cases, 1, timeout=120.0)[0]
    for found in workers.run(2, fit_cases, 2, timeout=240.0):
        for name in CASES:
            assert_same(found[name], expected[name])


class Writing(BasePredictionWriter):
    """Keeps which samples were predicted."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, *arguments: Any) -> None:
        self.indices.append(arguments[3])

    def write_on_epoch_end(self, *arguments: Any) -> None:
        self.indices.append(arguments[3])


def predict_written() -> Any:
    writing = Writing()
    trainer = make_trainer(devices=2, strategy=PipelineStrategy(), callbacks=[writing])
    trainer.predict(make_module(Synced), DataLoader(make_data(5), batch_size=2))
    return writing.indices


def test_all_ranks_know_which_samples_are_predicted(workers: WorkerPool) -> None:
    batches = [[0, 1], [2, 3], [4]]
    assert workers.run(2, predict_written) == [[*batches, [batches]]] * 2


class Failing(Dataset[Any]):
    def __init__(self, error: type[Exception]) -> None:
        self.error = error

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if os.environ["RANK"] != "0":
            raise AssertionError("only the first rank reads")
        if index == 9:
            raise self.error(f"sample {index} is broken")
        return make_data(NUM_SAMPLES)[index]


def fail(error: type[Exception], strategy: str) -> tuple[str, str]:
    devices, make = STRATEGIES[strategy]
    trainer = make_trainer(devices=devices, strategy=make())
    try:
        trainer.fit(make_module(Synced), DataLoader(Failing(error), BATCH_SIZE), make_loader(8))
    except Exception as raised:
        return type(raised).__name__, f"{raised} {raised.__cause__}"
    return "nothing", ""


@pytest.mark.parametrize("strategy", ["pipedream", "tp"])
@pytest.mark.parametrize("error", [KeyError, ValueError])
def test_a_failing_dataset_ends_all_ranks_with_the_cause(
    workers: WorkerPool, error: type[Exception], strategy: str
) -> None:
    first, *others = workers.run(STRATEGIES[strategy][0], fail, error, strategy)
    assert first[0] == error.__name__
    assert "sample 9 is broken" in first[1]
    for kind, text in others:
        assert kind == ("ValueError" if error is ValueError else "RankFailedError")
        assert "sample 9 is broken" in text


class Counted(Dataset[Any]):
    """Adds a byte to a file for each batch that is read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        with Path(self.path).open("ab") as file:
            file.write(b".")
        return make_data(BATCH_SIZE)[:]


class Slow(L.Callback):
    """Holds the last rank back, and keeps how many batches the first has read by then."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.leads: list[int] = []

    def look(self, trainer: L.Trainer, batch_idx: int) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            time.sleep(0.03)
            self.leads.append(Path(self.path).stat().st_size - batch_idx - 1)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.look(trainer, batch_idx)

    def on_predict_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.look(trainer, batch_idx)


def lead(strategy: str, folder: str) -> list[list[int]]:
    devices, make = STRATEGIES[strategy]
    found = []
    for run in ("fit", "predict"):
        path = f"{folder}/{run}"
        slow = Slow(path)
        trainer = make_trainer(devices=devices, strategy=make(), callbacks=[slow])
        loaders = [DataLoader(Counted(path), batch_size=None), make_loader(8)]
        getattr(trainer, run)(make_module(Synced), *loaders[: 2 if run == "fit" else 1])
        found.append(slow.leads)
    return found


@pytest.mark.parametrize("strategy", ["1f1b", "pipedream", "tp"])
def test_the_reader_is_no_further_ahead_than_the_pipeline_is_deep(
    workers: WorkerPool, strategy: str, tmp_path: Path
) -> None:
    devices = STRATEGIES[strategy][0]
    leads = workers.run(devices, lead, strategy, str(tmp_path))[-1]
    assert [len(of) for of in leads] == [12, 12]
    assert max(max(of) for of in leads) <= devices


def read_each() -> Any:
    data, watching = Noisy(), Watching()
    strategy = PipelineStrategy(num_microbatches=2, read="each")
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=[watching])
    L.seed_everything(5, verbose=False)
    trainer.fit(make_module(Synced), DataLoader(data, BATCH_SIZE, shuffle=True), make_loader(8))
    return watching.batches, data.num_read


def test_each_rank_can_read_for_itself(workers: WorkerPool) -> None:
    (batches, num_read), (others, others_read) = workers.run(2, read_each)
    assert num_read == others_read == NUM_SAMPLES
    assert len(batches["train"]) == len(others["train"])


@pytest.mark.parametrize("strategy", [PipelineStrategy, TensorParallelStrategy, MeshStrategy])
def test_other_ways_to_read_are_refused(strategy: Any) -> None:
    with pytest.raises(ValueError, match="read='last'"):
        strategy(read="last")


def augment_in_workers() -> list[Tensor]:
    L.seed_everything(11, workers=True)
    watching = Watching()
    loader = shuffled(num_workers=1, persistent_workers=True)
    trainer = make_trainer(
        devices=4,
        strategy=PipelineStrategy(num_stages=2),
        callbacks=[watching],
        use_distributed_sampler=True,
    )
    trainer.fit(make_module(Synced), loader, make_loader(8))
    return watching.batches["train"]


def test_workers_augment_alike_along_a_pipeline_and_not_across_replicas(
    workers: WorkerPool,
) -> None:
    first, second, third, fourth = (torch.cat(b) for b in workers.run(4, augment_in_workers))
    assert torch.equal(first, third)  # the mesh is pp x dp
    assert torch.equal(second, fourth)
    assert not torch.isclose(first, second).any()
