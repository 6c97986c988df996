"""Under fp16 all ranks scale the loss alike and leave the same steps out, bit for bit."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist import DDPStrategy, PipelineStrategy
from lightning_dist.callbacks import MixedPrecision
from tests.helpers.half_reference import (
    Reference,
    Scale,
    finite,
    half_weights,
    keep_norms,
    one_thread,
)
from tests.helpers.models import (
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
    share_of,
    state_of,
)
from tests.helpers.oracle import train_late, train_sequentially
from tests.helpers.workers import WorkerPool
from tests.integration.callbacks.test_mixed_precision import Recorded, assert_equal, joined

FP16 = torch.float16
NUM_SAMPLES, EPOCHS = 48, 3
SCALE, INTERVAL = 2.0**19, 3
"""Too large at the beginning, and again and again."""

Found = tuple[dict[str, Tensor], list[tuple[float, float]]]
"""A rank's parameters, and after each batch the scale and the number of steps left out."""


class Logged(Recorded):
    def on_train_batch_end(self, *_: Any) -> None:
        metrics = self.trainer.callback_metrics
        names = ("mixed_precision/loss_scale", "mixed_precision/skipped_steps")
        self.history.append(tuple(float(metrics[name]) for name in names))


def fit(strategy: Any, devices: int, loader: Any, **options: Any) -> Found:
    module = make_module(Logged).float()
    module.history = []
    callback = MixedPrecision("fp16", initial_scale=SCALE, growth_interval=INTERVAL)
    trainer = make_trainer(
        devices=devices, strategy=strategy, callbacks=[callback], max_epochs=EPOCHS, **options
    )
    trainer.fit(module, loader, make_loader(8))
    scale = callback.loss_scale
    assert scale is not None
    return state_of(module), [*module.history, (scale.value, float(scale.num_skipped))]


def reference(num_microbatches: int = 1, *, shares: int = 1) -> Found:
    module = make_module(Recorded).float()
    history = []
    with one_thread():
        scale = Scale(SCALE, INTERVAL)
        optimizer = make_optimizer("sgd", module.parameters())
        loop = Reference(module.model, optimizer, FP16, num_microbatches, scale)
        whole = [make_loader(NUM_SAMPLES)]
        parts = whole if shares == 1 else [share_of(rank, NUM_SAMPLES) for rank in range(shares)]
        for batches in EPOCHS * list(zip(*parts, strict=True)):
            loop.step(batches)
            history.append((scale.value, float(scale.num_skipped)))
    assert 2 <= scale.num_skipped < len(history) - 5
    return state_of(module), [*history, history[-1]]


def check(ranks: list[Found], expected: Found) -> None:
    for _, history in ranks:
        assert history == expected[1]
    assert_equal(joined([state for state, _ in ranks]), expected[0])


def test_single(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    check([fit("auto", 1, make_loader(NUM_SAMPLES))], reference())


def on_ddp() -> Found:
    return fit(DDPStrategy(), 2, share_of(int(os.environ["RANK"]), NUM_SAMPLES))


def test_ddp(workers: WorkerPool) -> None:
    ranks = workers.run(2, on_ddp)
    expected = reference(shares=2)
    check(ranks[:1], expected)
    check(ranks[1:], expected)


def on_stages(schedule: str) -> Found:
    strategy = PipelineStrategy(schedule=schedule, partition="uniform")
    return fit(strategy, 2, make_loader(NUM_SAMPLES))


def test_synchronous_stages(workers: WorkerPool) -> None:
    check(workers.run(2, on_stages, "1f1b"), reference(8))


class Late:
    """The scale of a batch, where what happened is known some batches later, or after a drain."""

    def __init__(self, num_unknown: int) -> None:
        self.num_unknown = num_unknown
        self.overflowed: dict[int, bool] = {}

    def scale_at(self, b: int) -> Scale:
        per_epoch = NUM_SAMPLES // 8
        scale = Scale(SCALE, INTERVAL)
        for update in range(b):
            if update < max(b - self.num_unknown, b // per_epoch * per_epoch):
                scale.note(self.overflowed[update])
        return scale

    def history(self) -> list[tuple[float, float]]:
        """The callback looks behind each batch, which is before the next; the last is drained."""
        num_batches = len(self.overflowed)
        self_at = [self.scale_before_drain(b + 1) for b in range(num_batches)]
        return [(s.value, float(s.num_skipped)) for s in [*self_at, self.scale_at(num_batches)]]

    def scale_before_drain(self, b: int) -> Scale:
        per_epoch = NUM_SAMPLES // 8
        scale = Scale(SCALE, INTERVAL)
        for update in range(b):
            if update < max(b - self.num_unknown, (b - 1) // per_epoch * per_epoch):
                scale.note(self.overflowed[update])
        return scale


def batches() -> list[tuple[Tensor, tuple[int, Tensor]]]:
    pairs = EPOCHS * list(make_loader(NUM_SAMPLES))
    return [(x.to(FP16), (b, y)) for b, (x, y) in enumerate(pairs)]


def pipedream_oracle() -> Found:
    model = make_module(Recorded).float().model
    keep_norms(model)
    stages = [model[:4], model[4:]]
    optimizers = [make_optimizer("sgd", stage.parameters()) for stage in stages]
    late = Late(num_unknown=2)

    def loss(logits: Tensor, target: tuple[int, Tensor]) -> Tensor:
        b, y = target
        return F.cross_entropy(logits.float(), y) * late.scale_at(b).value

    def step(s: int, b: int) -> None:
        for parameter in stages[s].parameters():
            parameter.grad /= late.scale_at(b).value
        is_finite = finite(stages[s])
        late.overflowed[b] = late.overflowed.get(b, False) or not is_finite
        if is_finite:
            optimizers[s].step()

    with one_thread():
        train_sequentially(
            stages,
            optimizers,
            batches(),
            loss,
            range(0, EPOCHS * 6, 6),
            "stash",
            copy=lambda m: half_weights(m, FP16),
            step=step,
        )
    return _named(model), late.history()


def late_oracle() -> Found:
    model = make_module(Recorded).float().model
    keep_norms(model)
    optimizer = make_optimizer("sgd", model.parameters())
    late = Late(num_unknown=1)

    def loss(logits: Tensor, target: tuple[int, Tensor]) -> Tensor:
        b, y = target
        return F.cross_entropy(logits.float(), y) * late.scale_at(b).value

    def step(b: int) -> None:
        for parameter in model.parameters():
            parameter.grad /= late.scale_at(b).value
        late.overflowed[b] = not finite(model)
        if not late.overflowed[b]:
            optimizer.step()

    with one_thread():
        train_late(
            model,
            optimizer,
            batches(),
            loss,
            range(0, EPOCHS * 6, 6),
            copy=lambda m: half_weights(m, FP16),
            step=step,
        )
    return _named(model), late.history()


def _named(model: nn.Module) -> dict[str, Tensor]:
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()}


def test_stages_that_update_apart(workers: WorkerPool) -> None:
    check(workers.run(2, on_stages, "pipedream"), pipedream_oracle())


def on_late_stages() -> Found:
    strategy = PipelineStrategy(schedule="pipedream_2bw", partition="uniform", num_microbatches=1)
    return fit(strategy, 2, make_loader(NUM_SAMPLES))


def test_stages_that_update_late(workers: WorkerPool) -> None:
    check(workers.run(2, on_late_stages), late_oracle())
