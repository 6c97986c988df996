"""PipeDream-2BW equals a sequential loop in which each batch sees weights of one update less."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from lightning_dist import PipelineStrategy
from lightning_dist.pipeline.pipeline import Pipeline
from tests.helpers.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    state_of,
)
from tests.helpers.oracle import train_one_batch_late
from tests.helpers.workers import WorkerPool

EPOCHS = 3
LR_DECAY = 0.9
CLIP = 0.05


def fit(num_stages: int, optimizer: str = "sgd", *, count: Any = "auto", **options: Any) -> Any:
    module = make_module(optimizer=optimizer, schedule_lr=options.pop("scheduled", False))
    strategy = PipelineStrategy(
        schedule="pipedream_2bw", num_microbatches=count, partition="uniform"
    )
    trainer = make_trainer(
        devices=num_stages,
        strategy=strategy,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        **{"limit_val_batches": 1, **options},
    )
    trainer.fit(module, make_loader(), make_loader())
    return state_of(module), float(trainer.callback_metrics["train_loss_epoch"])


def case(num_stages: int, optimizer: str, options: dict[str, Any]) -> Any:
    return fit(num_stages, optimizer, **options)


def oracle(
    optimizer: str = "sgd",
    *,
    drains: bool = True,
    scheduled: bool = False,
    clip: bool = False,
    num_samples: int = 46,
) -> tuple[dict[str, Tensor], list[float]]:
    model = make_module().model
    sgd = make_optimizer(optimizer, model.parameters())
    base = sgd.param_groups[0]["lr"]
    batches = [batch for _ in range(EPOCHS) for batch in make_loader(num_samples)]
    epoch = len(batches) // EPOCHS

    def before_step(b: int) -> None:
        sgd.param_groups[0]["lr"] = base * LR_DECAY**b if scheduled else base
        if clip:
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            assert norm > CLIP

    places: Collection[int] = range(0, len(batches), epoch) if drains else ()
    losses = train_one_batch_late(model, sgd, batches, F.cross_entropy, places, before_step)
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()}, losses[-epoch:]


def largest_difference(actual: list[Any], expected: dict[str, Tensor]) -> float:
    states: dict[str, Tensor] = {}
    for state, _ in actual:
        states.update(state)
    assert states.keys() == expected.keys()
    return max(float((states[n] - expected[n]).abs().max()) for n in expected)


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize(("num_stages", "optimizer"), [(2, "adamw"), (3, "sgd"), (4, "adamw")])
def test_equals_the_oracle_over_drains(
    workers: WorkerPool, num_stages: int, optimizer: str, extra: int
) -> None:
    options = {"count": num_stages - 1 + extra}
    actual = workers.run(num_stages, case, num_stages, optimizer, options)
    expected, losses = oracle(optimizer)
    assert largest_difference(actual, expected) < 1e-12
    sizes = [8, 8, 8, 8, 8, 6]
    mean = sum(size * loss for size, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    assert [logged for _, logged in actual] == pytest.approx([mean] * num_stages, abs=1e-12)


def test_is_not_flushed_between_epochs(workers: WorkerPool) -> None:
    actual = workers.run(3, case, 3, "sgd", {"limit_val_batches": 0})
    assert largest_difference(actual, oracle(drains=False)[0]) < 1e-12
    assert largest_difference(actual, oracle()[0]) > 1e-6


def test_update_b_uses_the_learning_rate_of_step_b(workers: WorkerPool) -> None:
    actual = workers.run(3, case, 3, "sgd", {"scheduled": True})
    assert largest_difference(actual, oracle(scheduled=True)[0]) < 1e-12


@pytest.mark.parametrize("num_stages", [2, 4])
def test_clips_by_the_norm_of_the_whole_gradient(workers: WorkerPool, num_stages: int) -> None:
    options = {"gradient_clip_val": CLIP, "count": num_stages - 1}
    actual = workers.run(num_stages, case, num_stages, "sgd", options)
    assert largest_difference(actual, oracle(clip=True)[0]) < 1e-12
    assert largest_difference(actual, oracle()[0]) > 1e-6


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


def fit_measured(num_stages: int) -> Any:
    module = make_module(Measured)
    trainer = make_trainer(
        devices=num_stages,
        strategy=PipelineStrategy(schedule="pipedream_2bw", partition="uniform"),
        max_epochs=EPOCHS,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        gradient_clip_val=CLIP,
    )
    trainer.fit(module, make_loader(), make_loader())
    return {n: v for n, v in state_of(module).items() if n.startswith("model.")}, 0.0


def test_norms_on_their_way_do_not_disturb_what_else_stages_share(workers: WorkerPool) -> None:
    actual = workers.run(3, fit_measured, 3, timeout=40)
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


def fit_replicas() -> Any:
    module = make_module()
    strategy = PipelineStrategy(schedule="pipedream_2bw", num_stages=2, partition="uniform")
    trainer = make_trainer(
        devices=4,
        strategy=strategy,
        max_epochs=EPOCHS,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        gradient_clip_val=CLIP,
    )
    data = make_data(48)
    sampler = DistributedSampler(data, shuffle=False, **strategy.distributed_sampler_kwargs)
    trainer.fit(module, DataLoader(data, batch_size=4, sampler=sampler), make_loader(8))
    return state_of(module), 0.0


def test_two_replicas_of_two_stages_equal_the_oracle(workers: WorkerPool) -> None:
    actual = workers.run(4, fit_replicas)
    assert largest_difference(actual, oracle(clip=True, num_samples=48)[0]) < 1e-12
    for first, second in ((0, 1), (2, 3)):
        for name, value in actual[first][0].items():
            assert torch.equal(value, actual[second][0][name])


def watch_memory(num_stages: int) -> tuple[list[int], tuple[int, ...], int]:
    """Gives what was in flight after each batch, the stash of each stage, and this stage's size."""
    flying: list[int] = []
    own_train_batch = Pipeline.train_batch

    def watched(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = own_train_batch(self, *args, **kwargs)
        (stage,) = self.stages.values()
        flying.append(stage.num_in_flight)
        return result

    module = make_module()
    strategy = PipelineStrategy(schedule="pipedream_2bw", partition="uniform")
    trainer = make_trainer(
        devices=num_stages, strategy=strategy, max_epochs=EPOCHS, limit_val_batches=0
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "train_batch", watched)
        trainer.fit(module, make_loader(), make_loader())
    num_bytes = sum(p.nbytes for p in module.parameters())
    return flying, strategy.peak_stash_bytes, num_bytes


def test_holds_two_versions_at_most(workers: WorkerPool) -> None:
    ranks = workers.run(4, watch_memory, 4)
    for stage, (flying, stashes, num_bytes) in enumerate(ranks):
        assert set(flying) == {3 - stage}
        # Nothing is in flight on the last stage when it updates.
        assert stashes[stage] == (num_bytes if stage < 3 else 0)
