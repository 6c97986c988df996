"""Layers that move while training runs: the same as a restart on the new cut, bit for bit."""

from __future__ import annotations

import gc
import logging
import random
import time
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric
from typing_extensions import override

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import MixedPrecision, StageBalancer
from lightning_dist.checkpoint import load_full
from lightning_dist.pipeline.timeline import SpanKind
from lightning_dist.strategies.failure_ring import RankFailedError
from tests.helpers.models import (
    Classifier,
    ConvLayer,
    make_data,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
)
from tests.helpers.traced_models import ResNet, Task, make_images
from tests.helpers.workers import WorkerPool

STEPS = 4
"""Batches of an epoch."""
BY_PARAMETERS = (2, 4)
"""The cut of :class:`Mixed` that balances the parameters of two stages."""


class NormLayer(nn.Module):
    """Has buffers that each batch changes, dropout, and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.dropout = nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.full((6,), 1.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.norm(x)) * self.scale


class SlowLayer(ConvLayer):
    """Small, and takes its time."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return super().forward(x)


class Mixed(Classifier):
    """Six layers; two groups of parameters, whose rates differ and fall."""

    def __init__(self, first: type[ConvLayer] = ConvLayer, **options: Any) -> None:
        super().__init__(schedule_lr=True, **options)
        parts = [first(0.1), NormLayer(), ConvLayer(0.1), NormLayer()]
        self.model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(12, 3))
        self.seen = MeanMetric()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen.update(loss.detach())
        self.losses.append(float(loss.detach()) + random.random())
        return loss

    def configure_optimizers(self) -> Any:
        norms = [p for n, p in self.named_parameters() if "norm" in n]
        others = [p for n, p in self.named_parameters() if "norm" not in n]
        groups = [{"params": norms, "lr": 0.002}, {"params": others}]
        optimizer = make_optimizer(self.optimizer, groups)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Move(L.Callback):
    """Moves layers at the end of the last batch of the first epoch, when batches are in flight."""

    def __init__(self, cut: list[int]) -> None:
        self.cut = cut
        self.gone: list[str] = []

    @override
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step != STEPS or trainer.current_epoch:
            return
        strategy: Any = trainer.strategy
        before = dict(pl_module.named_parameters())
        state = strategy.optimizers[0].state
        kept = {name: id(p) for name, p in before.items()}
        watched = [(name, weakref.ref(p)) for name, p in before.items()]
        watched += [
            (f"{name}.{key}", weakref.ref(value))
            for name, p in before.items()
            for key, value in state.get(p, {}).items()
            if isinstance(value, Tensor)
        ]
        watched += [(name, weakref.ref(b)) for name, b in pl_module.named_buffers()]
        del before
        gc.disable()  # memory is free at once, not when somebody looks for cycles
        done = strategy.repartition(self.cut)
        assert done.layers_per_stage == tuple(self.cut)
        assert done.moves
        now = dict(pl_module.named_parameters())
        stay = {name.rpartition(".")[0] for name in (*now, *dict(pl_module.named_buffers()))}
        for name, reference in watched:
            is_here = any(name.startswith(f"{owner}.") for owner in stay)
            assert (reference() is not None) == is_here, name
            self.gone += [] if is_here else [name]
        gc.enable()
        assert all(id(now[name]) == old for name, old in kept.items() if name in now)


def fit(
    strategy: dict[str, Any],
    cut: Any,
    epochs: int,
    module: dict[str, Any],
    callback: L.Callback | None = None,
    resume: str | None = None,
    save: str | None = None,
    trainer: dict[str, Any] | None = None,
) -> dict[str, Any]:
    random.seed(5)
    made = make_module(Mixed, **module)
    cutting = PipelineStrategy(partition=cut, **strategy)
    fitting = make_trainer(
        strategy=cutting,
        max_epochs=epochs,
        limit_val_batches=0,
        callbacks=[] if callback is None else [callback],
        **(trainer or {}),
    )
    data = make_data(8 * STEPS * cutting.mesh.data_size)
    sampler = DistributedSampler(data, shuffle=False, **cutting.distributed_sampler_kwargs)
    loader = DataLoader(data, 8, sampler=sampler)
    fitting.fit(made, loader, loader, ckpt_path=resume, weights_only=True)
    if save is not None:
        fitting.save_checkpoint(save)
    state = cutting.optimizer_state(cutting.optimizers[0])
    return {
        "weights": {name: value.clone() for name, value in made.state_dict().items()},
        "optimizer": {
            f"{name}.{key}": torch.as_tensor(value).clone()
            for name, entries in state["state"].items()
            for key, value in entries.items()
        },
        "groups": state["param_groups"],
        "loss": float(fitting.callback_metrics["train_loss_epoch"]),
        "cut": cutting._split.layers_per_stage,
        "updates": [len(stage) for stage in cutting.staleness],
        "metric": (float(made.seen.mean_value), float(made.seen.weight)),
        "losses": made.losses,
        "draws": (torch.rand(1).item(), random.random()),
        "spans": sum(span.kind is SpanKind.UPDATE for span in cutting.timeline.spans),
    }


def move_and_restart(
    root: str,
    world_size: int,
    strategy: dict[str, Any],
    cuts: tuple[list[int], list[int]],
    module: dict[str, Any],
    trainer: dict[str, Any],
) -> Any:
    before, after = cuts
    path = f"{root}/middle.ckpt"
    moving = Move(after)
    options = {"trainer": {"devices": world_size, **trainer}}
    moved = fit(strategy, before, 2, module, moving, save=f"{root}/moved.ckpt", **options)
    fit(strategy, before, 1, module, save=path, **options)
    restarted = fit(strategy, after, 2, module, resume=path, **options)
    return moved, restarted, moving.gone


SGD, ADAMW = {"optimizer": "sgd"}, {"optimizer": "adamw"}
CASES: dict[str, tuple[int, dict[str, Any], tuple[list[int], list[int]], dict[str, Any]]] = {
    "1f1b": (2, {"schedule": "1f1b", "num_microbatches": 2}, ([4, 2], [1, 5]), ADAMW),
    "stash, past a stage": (3, {"schedule": "pipedream"}, ([4, 1, 1], [1, 1, 4]), SGD),
    "predict": (
        2,
        {"schedule": "pipedream", "staleness_correction": "predict", "log_staleness": True},
        ([2, 4], [5, 1]),
        ADAMW,
    ),
    "2bw": (2, {"schedule": "pipedream_2bw", "num_microbatches": 2}, ([2, 4], [3, 3]), ADAMW),
    "interleaved, both ways": (
        2,
        {"schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_microbatches": 2},
        ([1, 2, 1, 2], [2, 2, 1, 1]),
        SGD,
    ),
    "two replicas": (
        4,
        {"num_stages": 2, "schedule": "1f1b", "num_microbatches": 2},
        ([1, 5], [3, 3]),
        SGD,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_a_restart_on_the_new_cut(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    world_size, strategy, cuts, module = CASES[name]
    ranks = workers.run(
        world_size, move_and_restart, str(tmp_path), world_size, strategy, cuts, module, {}
    )
    for moved, restarted, _ in ranks:
        assert moved["cut"] == restarted["cut"] == tuple(cuts[1])
        assert_same(moved, restarted)
        assert moved["updates"] == [2 * STEPS] * len(cuts[0])
        assert moved["spans"] == 2 * STEPS * world_size
    assert any(gone for *_, gone in ranks)
    saved = load_full(tmp_path / "moved.ckpt")["state_dict"]
    assert saved.keys() == {name for moved, *_ in ranks for name in moved["weights"]}
    for moved, *_ in ranks:
        assert all(torch.equal(saved[name], value) for name, value in moved["weights"].items())


def profile_and_repeat(strategy: dict[str, Any]) -> Any:
    options: dict[str, Any] = {"trainer": {"devices": 2}}
    module = {"first": SlowLayer}
    profiled = fit(strategy, "profile", 1, module, **options)
    by_hand = fit(strategy, list(profiled["cut"]), 1, module, **options)
    return profiled, by_hand


@pytest.mark.parametrize(
    "strategy",
    [{"schedule": "1f1b", "num_microbatches": 2}, {"schedule": "pipedream"}],
    ids=["1f1b", "pipedream"],
)
def test_profiles_before_the_first_step_and_leaves_no_trace(
    workers: WorkerPool, strategy: dict[str, Any]
) -> None:
    for profiled, by_hand in workers.run(2, profile_and_repeat, strategy):
        assert profiled["cut"] == (1, 5) != BY_PARAMETERS
        assert_same(profiled, by_hand)
        for key in ("losses", "draws", "metric", "updates", "spans"):
            assert profiled[key] == by_hand[key], key


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["cut"] == right["cut"]
    assert left["groups"] == right["groups"]
    assert left["loss"] == right["loss"]
    for kind in ("weights", "optimizer"):
        assert left[kind].keys() == right[kind].keys()
        for key, value in left[kind].items():
            assert torch.equal(value, right[kind][key]), key


class ToAndFro(L.Callback):
    """Gives the last stage nearly all layers after the first batch, and the first one after two."""

    def __init__(self, ends: tuple[int, int] = (0, 1)) -> None:
        self.ends = ends

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rest = sum(trainer.strategy.session.pipeline.shape.layers_per_stage) - 1
        if batch_idx < 2:
            trainer.strategy.repartition([[1, rest], [rest, 1]][self.ends[batch_idx]])


class Body(nn.Module):
    """Keeps its own forward, and has parts before and behind its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(ConvLayer() for _ in range(4))
        self.norm = nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden).flatten(1)


class OfBlocks(Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="adamw")
        self.model = Body()


# What is trained, by which strategy and trainer, on what.
TO_AND_FRO: dict[str, tuple[Any, dict[str, Any], dict[str, Any], Any]] = {
    "gradients that wait": (Classifier, {}, {"accumulate_grad_batches": 2}, make_loader),
    "blocks": (OfBlocks, {"layers": "model.blocks"}, {}, make_loader),
    "traced": (partial(Task, ResNet), {"layers": "trace", "num_microbatches": 1}, {}, make_images),
}


def go_to_and_fro(name: str, *, moves: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    module, strategy, options, loader = TO_AND_FRO[name]
    made = make_module(module)
    trainer = make_trainer(
        devices=2,
        strategy=PipelineStrategy(partition="uniform", **strategy),
        callbacks=[ToAndFro()] if moves else [],
        **options,
    )
    trainer.fit(made, loader(), loader(8))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(made, loader(8), verbose=False)
    return dict(made.state_dict()), {**metrics, **validated}


def run_both(name: str) -> Any:
    return go_to_and_fro(name, moves=True), go_to_and_fro(name, moves=False)


@pytest.mark.parametrize("name", TO_AND_FRO)
def test_a_synchronous_run_does_not_notice(workers: WorkerPool, name: str) -> None:
    moved: dict[str, Tensor] = {}
    stayed: dict[str, Tensor] = {}
    for (left, left_metrics), (right, right_metrics) in workers.run(2, run_both, name):
        moved |= left
        stayed |= right
        assert left_metrics == right_metrics
        assert left.keys() != right.keys()
    assert moved.keys() == stayed.keys()
    for key, value in moved.items():
        assert torch.equal(value, stayed[key]), key


class Tied(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(3)))
        self.model[2].weight = self.model[0].weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0].flatten(1)).square().mean()


class Asking(L.Callback):
    """Asks for cuts that cannot be had, and keeps the answers."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    def ask(self, strategy: Any, cut: list[int]) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011  (what it says is returned)
            strategy.repartition(cut)
        self.answers.append(str(error.value))

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        rank = trainer.strategy.global_rank
        for cut in ([1, 9], [1 + rank, 2 - rank], [2, 1]):
            self.ask(trainer.strategy, cut)


def refusal_of(partition: Any, callback: L.Callback) -> str:
    strategy = PipelineStrategy(partition=partition)
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=[callback], limit_val_batches=0)
    with pytest.raises(ValueError) as error:  # noqa: PT011  (what it says is returned)
        trainer.fit(make_module(Tied).float(), make_loader(8), make_loader(8))
    return str(error.value)


def refuse_at_start() -> list[str]:
    return [
        refusal_of("profile", L.Callback()),
        refusal_of([1, 2], StageBalancer(action="rebalance")),
        refusal_of("profile", MixedPrecision()),
    ]


def test_what_could_not_move_is_refused_before_anything_runs(
    workers: WorkerPool,
) -> None:
    for answers in workers.run(2, refuse_at_start):
        *tied, masters = answers
        assert all("'0.weight'" in answer and "one by one" in answer for answer in tied)
        assert "MixedPrecision keeps copies of the parameters" in masters


def ask() -> list[str]:
    asking, strategy = Asking(), PipelineStrategy(partition=[1, 2])
    asking.ask(strategy, [2, 1])
    make_trainer(devices=2, strategy=strategy, callbacks=[asking], limit_val_batches=0).fit(
        make_module(Tied), make_loader(8), make_loader(8)
    )
    return asking.answers


def test_bad_cuts_are_refused_alike(workers: WorkerPool) -> None:
    first, second = workers.run(2, ask)
    assert first == second
    for answer, part in zip(
        first,
        (
            r"repartition([2, 1]) was called while the model is not cut",
            "partition=[1, 9] must give each of the 2 stages at least one layer and sum to the 3",
            "Rank 0 asks for the cut [1, 2], and rank 1 for [2, 1]",
            "The parameters '0.weight' (stage 0) and '2.weight' (stage 1) are tied",
        ),
        strict=True,
    ):
        assert part in answer


class Stubborn(nn.Linear):
    """Cannot be taken along."""

    def get_extra_state(self) -> Any:
        raise KeyError("a layer that does not want to go")


class OfStubborn(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), Stubborn(12, 12), nn.Linear(12, 3))


def fail() -> str:
    strategy = PipelineStrategy(partition=[1, 2])
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=[ToAndFro((1, 0))])
    with pytest.raises((KeyError, RankFailedError)) as error:
        trainer.fit(make_module(OfStubborn), make_loader(8), make_loader(8))
    return type(error.value).__name__


def test_a_rank_that_waits_for_a_layer_learns_that_it_does_not_come(workers: WorkerPool) -> None:
    begin = time.monotonic()
    waited, failed = workers.run(2, fail)
    assert (waited, failed) == ("RankFailedError", "KeyError")
    assert time.monotonic() - begin < 20


def evaluate_only(strategy: PipelineStrategy) -> tuple[int, ...]:
    trainer = make_trainer(devices=2, strategy=strategy)
    trainer.validate(make_module(Mixed), make_loader(8), verbose=False)
    return strategy._split.layers_per_stage


def evaluate_twice() -> Any:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        cuts = [evaluate_only(PipelineStrategy(partition=how)) for how in ("profile", "parameters")]
    finally:
        logger.removeHandler(handler)
    return cuts, [text for text in said if "partition='profile'" in text]


def test_what_does_not_train_is_cut_by_parameters_and_says_so(workers: WorkerPool) -> None:
    (cuts, said), (other_cuts, other_said) = workers.run(2, evaluate_twice)
    assert cuts == other_cuts == [BY_PARAMETERS, BY_PARAMETERS]
    assert len(said) == 1
    assert "cut by parameters" in said[0]
    assert other_said == []
