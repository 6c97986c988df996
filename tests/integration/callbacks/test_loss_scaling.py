"""Under fp16 all ranks scale the loss alike and leave the same steps out, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.half_reference import Scale, finite, half_weights, keep_norms, one_thread
from tests.helpers.networks.models import make_module, make_optimizer
from tests.helpers.oracle import train_late, train_sequentially
from tests.helpers.processes.workers import WorkerPool
from tests.integration.callbacks.half_common import (
    Asked,
    Halved,
    History,
    Run,
    assert_equal,
    batches_of,
    expected,
    fit,
    joined,
    largest_difference,
)

FP16 = torch.float16
EPOCHS, BATCHES_PER_EPOCH = 3, 6
SCALE, INTERVAL = 2.0**19, 3
"""Too large at the beginning, and again and again."""

PRECISION = {"compute": "fp16", "initial_scale": SCALE, "growth_interval": INTERVAL}
TRAINER = {"max_epochs": EPOCHS}
MAKE: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "1f1b": lambda: PipelineStrategy(num_microbatches=8),
    "pipedream": lambda: PipelineStrategy(schedule="pipedream", partition="uniform"),
    "2bw": lambda: PipelineStrategy(schedule="pipedream_2bw", num_microbatches=1),
    "traced 1f1b": lambda: PipelineStrategy(layers="trace", num_microbatches=8),
    "traced pipedream": lambda: PipelineStrategy(
        schedule="pipedream", layers="trace", partition=[12, 7]
    ),
}


def run(name: str, *asked: Asked) -> list[Run]:
    return [fit(MAKE[name](), 2, each) for each in asked]


def reference(**options: Any) -> Run:
    found = expected(epochs=EPOCHS, dtype=FP16, scale=Scale(SCALE, INTERVAL), **options)
    skipped = found.history[-1][1]
    assert 2 <= skipped < len(found.history) / 2
    return found


def check(ranks: list[Run], found: Run) -> None:
    for rank in ranks:
        assert rank.history == found.history
    assert_equal(joined(ranks), found.state)


def test_a_single_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = str(tmp_path / "end.ckpt")
    found = reference()
    check([fit("auto", 1, Asked(PRECISION, TRAINER, save=path))], found)
    fit("auto", 1, Asked(PRECISION, {"max_epochs": 2}, save=path))
    resumed = fit("auto", 1, Asked(PRECISION, TRAINER, resume=path))
    check([resumed], Run(found.state, found.history[2 * BATCHES_PER_EPOCH :], {}))
    trainer = {**TRAINER, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    check([fit("auto", 1, Asked(PRECISION, trainer))], reference(accumulate=2, clip=0.1))


class Scheduled(Halved):
    """Has a scheduler that would warn of a first step that was left out."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(schedule_lr=True, **kwargs)


def test_a_fixed_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    one = fit("auto", 1, Asked({"compute": "fp16", "loss_scale": 2.0**7}))
    check([one], expected(dtype=FP16, scale=Scale(2.0**7)))
    one = fit("auto", 1, Asked({"compute": "fp16", "loss_scale": 2.0**40}), Scheduled)
    assert one.history[-1] == (2.0**40, 6.0)


@pytest.mark.some("ddp")
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_replicas_and_shards(workers: WorkerPool, name: str) -> None:
    ranks = workers.run(2, run, name, Asked(PRECISION, TRAINER, shares=2))
    check([run for (run,) in ranks], reference(shares=2))


@pytest.mark.parametrize("name", ["1f1b", pytest.param("traced 1f1b", marks=pytest.mark.long)])
def test_synchronous_stages(workers: WorkerPool, name: str) -> None:
    trainer = {**TRAINER, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    asked = Asked(PRECISION, TRAINER), Asked(PRECISION, trainer)
    plain, clipped = zip(*workers.run(2, run, name, *asked), strict=True)
    check(plain, reference(num_microbatches=8))
    found = reference(num_microbatches=8, accumulate=2, clip=0.1)
    assert clipped[0].history == clipped[1].history == found.history
    assert largest_difference(joined(clipped), found.state) < 1e-6


class Late:
    """The scale of a batch, where what became of the batches before is not all known.

    Args:
        num_unknown: Of the latest batches, unless the pipeline was drained since.
    """

    def __init__(self, num_unknown: int) -> None:
        self._num_unknown = num_unknown
        self.overflowed: dict[int, bool] = {}

    def scale(self, b: int, drained: int) -> Scale:
        scale = Scale(SCALE, INTERVAL)
        for update in range(max(b - self._num_unknown, drained)):
            scale.note(self.overflowed[update])
        return scale

    def of_batch(self, b: int) -> float:
        return self.scale(b, b - b % BATCHES_PER_EPOCH).value

    def history(self) -> History:
        """What a callback sees behind each batch, and behind the last drain."""
        count = len(self.overflowed)
        scales = [self.scale(b + 1, b - b % BATCHES_PER_EPOCH) for b in range(count)]
        return [(s.value, float(s.num_skipped)) for s in [*scales, self.scale(count, count)]]

    def loss(self, logits: Tensor, target: tuple[int, Tensor]) -> Tensor:
        b, y = target
        return F.cross_entropy(logits.float(), y) * self.of_batch(b)

    def step(self, part: nn.Module, optimizer: torch.optim.Optimizer, b: int) -> None:
        for parameter in part.parameters():
            parameter.grad /= self.of_batch(b)
        is_finite = finite(part)
        self.overflowed[b] = self.overflowed.get(b, False) or not is_finite
        if is_finite:
            optimizer.step()


def batches() -> list[tuple[Tensor, tuple[int, Tensor]]]:
    pairs = [pair for (pair,) in batches_of(1, EPOCHS)]
    return [(x.to(FP16), (b, y)) for b, (x, y) in enumerate(pairs)]


def copy(module: nn.Module) -> dict[str, Tensor]:
    return half_weights(module, FP16)


def oracle(name: str) -> Run:
    """Stages decide by themselves under pipedream, and know of each other two batches later."""
    model = make_module(Halved).float().model
    keep_norms(model)
    drains = range(0, EPOCHS * BATCHES_PER_EPOCH, BATCHES_PER_EPOCH)
    late = Late(num_unknown=1 if name == "2bw" else 2)
    parts = [model] if name == "2bw" else [model[:4], model[4:]]
    optimizers = [make_optimizer("sgd", part.parameters()) for part in parts]

    def step(s: int, b: int) -> None:
        late.step(parts[s], optimizers[s], b)

    with one_thread():
        if name == "2bw":
            train_late(
                model,
                optimizers[0],
                batches(),
                late.loss,
                drains,
                copy=copy,
                step=lambda b: step(0, b),
            )
        else:
            train_sequentially(
                parts, optimizers, batches(), late.loss, drains, "stash", copy=copy, step=step
            )
    state = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    assert 2 <= sum(late.overflowed.values()) < len(late.overflowed) / 2
    return Run(state, late.history(), {})


@pytest.mark.some("2bw")
@pytest.mark.parametrize(
    "name", ["pipedream", "2bw", pytest.param("traced pipedream", marks=pytest.mark.long)]
)
def test_asynchronous_stages(workers: WorkerPool, name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    middle = Asked(PRECISION, {"max_epochs": 2}, save=path)
    resumed = Asked(PRECISION, TRAINER, resume=path)
    ranks = workers.run(2, run, name, middle, resumed)
    found = oracle(name)
    check([rank[1] for rank in ranks], Run(found.state, found.history[2 * BATCHES_PER_EPOCH :], {}))
    for first, second in ranks:
        assert first.history[:-1] == found.history[: 2 * BATCHES_PER_EPOCH]
        assert [len(run.history) for run in (first, second)] == [13, 7]
    saved = load_full(path)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
