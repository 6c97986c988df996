"""Parameters that stages share train as on one device, with one copy of each in a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist import PipelineStrategy
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.schedules.registry import FAMILIES
from tests.helpers.networks.models import make_module, make_optimizer, make_trainer, state_of
from tests.helpers.oracle import foresee, train_late
from tests.helpers.processes.workers import WorkerPool

WIDTH, WORDS, LENGTH, BATCH = 6, 11, 4, 8
OPTIONS = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
LATE = {"schedule": "pipedream_2bw"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def tied_layers(words: int = WORDS) -> nn.Sequential:
    """A language model whose head is its embedding, and three of whose blocks share a weight."""
    blocks = [Block() for _ in range(6)]
    for other in (2, 4):
        blocks[other].linear.weight = blocks[0].linear.weight
    embedding, head = nn.Embedding(words, WIDTH), nn.Linear(WIDTH, words, bias=False)
    head.weight = embedding.weight
    return nn.Sequential(embedding, *blocks, head)


class TiedText(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = tied_layers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", loss_of(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return make_optimizer("adamw", self.parameters())


class KeepsGradients(TiedText):
    """Clears gradients before each second update only."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.global_step % 2 == 0:
            optimizer.zero_grad()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loader(strategy: PipelineStrategy | None = None, num_samples: int = 32) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, WORDS, (num_samples, LENGTH + 1), generator=generator)
    data, sampler, replicas = TensorDataset(words[:, :-1], words[:, 1:]), None, 1
    if strategy is not None and strategy.mesh.data_size > 1:
        replicas = strategy.mesh.data_size
        sampler = DistributedSampler(data, shuffle=False, **strategy.distributed_sampler_kwargs)
    return DataLoader(data, batch_size=BATCH // replicas, sampler=sampler)


def fit(
    devices: int,
    strategy: dict[str, Any] | None,
    options: dict[str, Any],
    epochs: int = 2,
    resume: str | None = None,
    save: str | None = None,
    kind: type[TiedText] = TiedText,
) -> dict[str, Tensor]:
    """Trains in one go, from a checkpoint or from the start; gives this rank's parameters."""
    module = make_module(kind)
    if devices > 1 and int(os.environ["RANK"]) == devices - 1:
        for tied in (module.model[0].weight, module.model[1].linear.weight):
            tied.data.add_(0.1)  # as in processes that nobody has seeded
    own = None if strategy is None else PipelineStrategy(partition="uniform", **strategy)
    trainer = make_trainer(
        devices=devices, strategy=own or "auto", max_epochs=epochs, limit_val_batches=1, **options
    )
    trainer.fit(module, loader(own), loader(own), ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module)


def fit_each(devices: int, strategies: list[dict[str, Any]], options: dict[str, Any]) -> Any:
    return [fit(devices, strategy, options) for strategy in strategies]


def other_names(names: Any) -> dict[str, str]:
    """Maps the first name of a tied parameter to what it may be on other stages."""
    first = {"model.7.weight": "model.0.weight"}
    block = {f"model.{i}.linear.weight": "model.1.linear.weight" for i in (3, 5)}
    return {name: (first | block).get(name, name) for name in names}


def assert_equal_to(expected: dict[str, Tensor], ranks: list[dict[str, Tensor]]) -> None:
    """Compares all ranks with the whole model, and copies with each other bit for bit."""
    found: dict[str, Tensor] = {}
    for state in ranks:
        for name, first in other_names(state).items():
            assert float((state[name] - expected[first]).abs().max()) < 1e-12, name
            assert torch.equal(found.setdefault(first, state[name]), state[name]), name
    assert found.keys() == expected.keys()


SYNCHRONOUS = [n for n, f in FAMILIES.items() if not f.update_rule.is_asynchronous]


@pytest.mark.some("4-*")
@pytest.mark.parametrize(("devices", "schedules"), [(2, SYNCHRONOUS), (4, ["1f1b", "zbv"])])
def test_synchronous_schedules_equal_a_single_device(
    workers: WorkerPool, devices: int, schedules: list[str]
) -> None:
    expected = fit(1, None, OPTIONS)
    strategies = [{"schedule": name, "num_microbatches": 4} for name in schedules]
    ranks = workers.run(devices, fit_each, devices, strategies, OPTIONS)
    for results in zip(*ranks, strict=True):
        assert_equal_to(expected, list(results))
    unclipped = fit(1, None, {**OPTIONS, "gradient_clip_val": None})
    assert any(not torch.allclose(unclipped[name], value) for name, value in expected.items())


class SparseText(TiedText):
    """Has rows of its embedding as gradients, and all rows of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.model[0].sparse = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_rows_are_added_to_whole_gradients_of_another_stage(
    workers: WorkerPool, schedule: str
) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": 2}
    expected = fit(1, None, options, kind=SparseText)
    strategy = {"schedule": schedule}
    assert_equal_to(expected, workers.run(2, fit, 2, strategy, options, 2, None, None, SparseText))


def fit_keeping(devices: int, strategy: dict[str, Any] | None, accumulated: int) -> Any:
    options = {**OPTIONS, "accumulate_grad_batches": accumulated}
    return fit(devices, strategy, options, kind=KeepsGradients)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_kept_over_updates_count_once(workers: WorkerPool, accumulated: int) -> None:
    expected = fit_keeping(1, None, accumulated)
    strategy = {"schedule": "1f1b", "num_microbatches": 4}
    assert_equal_to(expected, workers.run(2, fit_keeping, 2, strategy, accumulated))
    cleared = fit(1, None, {**OPTIONS, "accumulate_grad_batches": accumulated})
    assert any(not torch.allclose(cleared[name], value) for name, value in expected.items())


def oracle(*, predicts: bool = False) -> dict[str, Tensor]:
    model = make_module(TiedText).model
    optimizer = make_optimizer("adamw", model.parameters())
    batches = list(loader()) * 2

    def clip(_: int) -> None:
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.05) > 0.05

    foreseeing = foresee if predicts else None
    drains = (0, len(batches) // 2)
    train_late(model, optimizer, batches, loss_of, drains, clip, foresee=foreseeing)
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()}


def test_2bw_equals_its_oracle_and_replicas_their_pipeline(workers: WorkerPool) -> None:
    clip = {"gradient_clip_val": 0.05}
    predicts = {"staleness_correction": "predict"}
    strategies = [{**LATE, "num_microbatches": 3}, {**LATE, "num_stages": 2}, {**LATE, **predicts}]
    found = zip(*workers.run(4, fit_each, 4, strategies, clip), strict=True)
    for strategy, results in zip(strategies, found, strict=True):
        assert_equal_to(oracle(predicts=predicts.items() <= strategy.items()), list(results))
    synchronous = [{"schedule": "1f1b", "num_stages": 2, "num_microbatches": 2}]
    ranks = workers.run(4, fit_each, 4, synchronous, OPTIONS)
    assert_equal_to(fit(1, None, OPTIONS), [state for (state,) in ranks])


@pytest.fixture(scope="module")
def saved(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints after one epoch, by different layouts."""
    root = tmp_path_factory.mktemp("saved")
    paths = {name: str(root / f"{name}.ckpt") for name in ("four", "whole", "plain")}
    sync = {"schedule": "1f1b", "num_microbatches": 2}
    workers.run(4, fit, 4, sync, {}, 1, None, paths["four"])
    workers.run(2, fit, 2, {**sync, "save_full": True}, {}, 1, None, paths["whole"])
    fit(1, None, {}, 1, None, paths["plain"])
    return paths


def resume_each(devices: int, strategy: dict[str, Any], paths: list[str]) -> Any:
    return [fit(devices, strategy, {}, 2, path) for path in paths]


@pytest.mark.long
def test_any_layout_resumes_any_other(workers: WorkerPool, saved: dict[str, str]) -> None:
    expected = fit(1, None, {})
    for devices, schedule in ((1, "1f1b"), (2, "zbv"), (4, "1f1b")):
        strategy = {"schedule": schedule, "num_microbatches": 2}
        ranks = workers.run(devices, resume_each, devices, strategy, list(saved.values()))
        for results in zip(*ranks, strict=True):
            assert_equal_to(expected, list(results))
    merged = str(Path(saved["four"]).with_name("merged.ckpt"))
    torch.save(load_full(saved["four"]), merged)
    assert_equal_to(expected, [fit(1, None, {}, 2, merged)])


def test_a_checkpoint_has_one_copy_and_the_names_of_a_single_device(
    saved: dict[str, str],
) -> None:
    keys = FileSystemReader(saved["four"]).read_metadata().state_dict_metadata
    assert {"model.model.0.weight", "optimizer.0.model.0.weight.exp_avg"} <= set(keys)
    assert not any("model.7.weight" in key for key in keys)
    plain = load_full(saved["plain"])
    for form in ("four", "whole"):
        found = load_full(saved[form])
        assert found.keys() == plain.keys()
        assert found["state_dict"].keys() == plain["state_dict"].keys()
        tied = [found["state_dict"][f"model.{i}.linear.weight"] for i in (1, 3, 5)]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tied}) == 1
        ours, theirs = found["optimizer_states"][0], plain["optimizer_states"][0]
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()


def fit_again(devices: int, strategy: dict[str, Any] | None) -> Any:
    """Fits, evaluates and fits once more, on a model that has been cut by then."""
    module = make_module(TiedText)
    own = None if strategy is None else PipelineStrategy(partition="uniform", **strategy)
    trainer = make_trainer(devices=devices, strategy=own or "auto", limit_val_batches=1)
    trainer.fit(module, loader(), loader())
    trainer.validate(module, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(), loader())
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])
    num_named = len(state["param_groups"][0]["params"])
    return state_of(module), float(trainer.callback_metrics["val_loss"]), num_named


def test_a_model_that_was_cut_before_is_still_tied(workers: WorkerPool) -> None:
    expected, loss, num_named = fit_again(1, None)
    strategy = {"schedule": "interleaved_1f1b", "num_microbatches": 2}
    ranks = workers.run(2, fit_again, 2, strategy)
    assert_equal_to(expected, [state for state, *_ in ranks])
    for _, found, named in ranks:
        assert (found, named) == (pytest.approx(loss), num_named)
