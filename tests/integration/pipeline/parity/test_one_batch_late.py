"""PipeDream-2BW equals a sequential loop in which each batch sees weights of one update less."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_dist import PipelineStrategy
from lightning_dist.engine.pipeline.pipeline import Pipeline
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_optimizer
from tests.helpers.oracle import foresee_at, train_late
from tests.helpers.processes.workers import WorkerPool
from tests.integration.pipeline.common import (
    EPOCHS,
    LR_DECAY,
    SIZES,
    assert_replicas_agree,
    fit,
    fit_counting,
    fit_replicas,
    largest_difference,
    mean_of,
    trainer_of,
)

LATE = {"schedule": "pipedream_2bw"}
PREDICTING = {**LATE, "staleness_correction": "predict"}
CLIP = 0.05
CLIPPED = {"gradient_clip_val": CLIP}


def oracle(
    optimizer: str = "sgd",
    *,
    drains: bool = True,
    scheduled: bool = False,
    clip: bool = False,
    num_samples: int = sum(SIZES),
    predicts: bool = False,
) -> tuple[dict[str, Tensor], list[float]]:
    model = make_module().model
    sgd = make_optimizer(optimizer, model.parameters())
    base = sgd.param_groups[0]["lr"]
    batches = [batch for _ in range(EPOCHS) for batch in make_loader(num_samples)]
    epoch = len(batches) // EPOCHS

    def rate(b: int) -> float:
        return float(base * LR_DECAY**b) if scheduled else base

    def before_step(b: int) -> None:
        sgd.param_groups[0]["lr"] = rate(b)
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            assert norm > CLIP

    places: Collection[int] = range(0, len(batches), epoch) if drains else ()
    losses = train_late(
        model,
        sgd,
        batches,
        F.cross_entropy,
        places,
        before_step,
        foresee=foresee_at(rate) if predicts else None,
    )
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()}, losses[-epoch:]


@pytest.mark.some("4-adamw-0")
@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize(("num_stages", "optimizer"), [(2, "adamw"), (3, "sgd"), (4, "adamw")])
def test_equals_the_oracle_over_drains(
    workers: WorkerPool, num_stages: int, optimizer: str, extra: int
) -> None:
    strategy = {**LATE, "num_microbatches": num_stages - 1 + extra}
    actual = workers.run(num_stages, fit, num_stages, strategy, {"optimizer": optimizer})
    expected, losses = oracle(optimizer)
    assert largest_difference(actual, expected) < 1e-12
    mean = mean_of(losses)
    assert [logged for _, logged in actual] == pytest.approx([mean] * num_stages, abs=1e-12)


@pytest.mark.some("2")
@pytest.mark.parametrize("num_stages", [2, 3])
def test_what_an_optimizer_counts_in_its_groups_is_not_rolled_back(
    workers: WorkerPool, num_stages: int
) -> None:
    actual = workers.run(num_stages, fit_counting, num_stages, LATE)
    expected, _ = oracle("schedule_free", scheduled=True)
    assert largest_difference(actual, expected) < 1e-12
    assert [count for _, count in actual] == [EPOCHS * len(SIZES)] * num_stages


def test_is_not_flushed_between_epochs(workers: WorkerPool) -> None:
    actual = workers.run(3, fit, 3, LATE, {}, {"limit_val_batches": 0})
    assert largest_difference(actual, oracle(drains=False)[0]) < 1e-12
    assert largest_difference(actual, oracle()[0]) > 1e-6


def test_update_b_uses_the_learning_rate_of_step_b(workers: WorkerPool) -> None:
    actual = workers.run(3, fit, 3, LATE, {"schedule_lr": True})
    assert largest_difference(actual, oracle(scheduled=True)[0]) < 1e-12


@pytest.mark.some("2")
@pytest.mark.parametrize("num_stages", [2, 4])
def test_clips_by_the_norm_of_the_whole_gradient(workers: WorkerPool, num_stages: int) -> None:
    strategy = {**LATE, "num_microbatches": num_stages - 1}
    actual = workers.run(num_stages, fit, num_stages, strategy, {}, CLIPPED)
    assert largest_difference(actual, oracle(clip=True)[0]) < 1e-12
    assert largest_difference(actual, oracle()[0]) > 1e-6


@pytest.mark.some("3-adamw-1")
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize(("num_stages", "optimizer"), [(2, "sgd"), (3, "adamw"), (4, "sgd")])
def test_batches_see_where_the_optimizer_goes(
    workers: WorkerPool, num_stages: int, optimizer: str, extra: int
) -> None:
    strategy = {**PREDICTING, "num_microbatches": num_stages - 1 + extra}
    options = {"optimizer": optimizer, "schedule_lr": True}
    actual = workers.run(num_stages, fit, num_stages, strategy, options, CLIPPED)
    given = {"scheduled": True, "clip": True}
    assert largest_difference(actual, oracle(optimizer, **given, predicts=True)[0]) < 1e-12
    assert largest_difference(actual, oracle(optimizer, **given)[0]) > 1e-6


class Measured(Classifier):
    """Asks for a metric, which the stages share, between any two batches."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.mean.compute()


def test_norms_on_their_way_do_not_disturb_what_else_stages_share(workers: WorkerPool) -> None:
    actual = workers.run(3, fit, 3, LATE, {}, CLIPPED, Measured, timeout=40)
    assert largest_difference(actual, oracle(clip=True)[0]) < 1e-12


def test_the_oracle_tells_late_from_prompt() -> None:
    late, _ = oracle()
    model = make_module().model
    sgd = make_optimizer("sgd", model.parameters())
    for _ in range(EPOCHS):
        for x, y in make_loader():
            sgd.zero_grad()
            F.cross_entropy(model(x), y).backward()
            sgd.step()
    prompt = {n: p.detach() for n, p in model.named_parameters()}
    assert max(float((late[f"model.{n}"] - p).abs().max()) for n, p in prompt.items()) > 1e-6


def test_two_replicas_of_two_stages_equal_the_oracle(workers: WorkerPool) -> None:
    actual = workers.run(4, fit_replicas, LATE, CLIPPED)
    assert largest_difference(actual, oracle(clip=True, num_samples=48)[0]) < 1e-12
    assert_replicas_agree(actual)


def watch_memory(num_stages: int, options: Any) -> tuple[list[int], tuple[int, ...], int]:
    """Gives what was in flight after each batch, the stash of each stage, and this stage's size."""
    flying: list[int] = []
    own_train_batch = Pipeline.train_batch

    def watched(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = own_train_batch(self, *args, **kwargs)
        (stage,) = self.stages.values()
        flying.append(len(stage.in_flight))
        return result

    module = make_module()
    strategy = PipelineStrategy(partition="uniform", **options)
    trainer = trainer_of(num_stages, strategy, {"limit_val_batches": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "train_batch", watched)
        trainer.fit(module, make_loader(), make_loader())
    num_bytes = sum(p.nbytes for p in module.parameters())
    return flying, strategy.peak_stash_bytes, num_bytes


@pytest.mark.some("predicted")
@pytest.mark.parametrize(
    ("options", "on_the_last", "before"),
    # Nothing is in flight on the last stage when it updates.
    [(LATE, 0, 1), (PREDICTING, 1, 2)],
    ids=["as they are", "predicted"],
)
def test_holds_few_versions(
    workers: WorkerPool, options: dict[str, Any], on_the_last: int, before: int
) -> None:
    ranks = workers.run(4, watch_memory, 4, options)
    for stage, (flying, stashes, num_bytes) in enumerate(ranks):
        assert set(flying) == {3 - stage}
        assert stashes[stage] == num_bytes * (before if stage < 3 else on_the_last)
