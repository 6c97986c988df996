"""The recipe's GPT under TensorParallelStrategy equals a single device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import FSDPStrategy, TensorParallelStrategy
from lightning_dist.engine.tensors.dtensor import whole
from recipes.gpt import GPT
from tests.helpers.gpt_parity import DEPTH, Fitted, check_equal, data, fit, make_gpt
from tests.helpers.networks.models import make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

PLAN = {
    "model.0.token": "vocab",
    "model.*.attention.qkv": "colwise",
    "model.*.attention.out": "rowwise",
    "model.*.up": "colwise",
    "model.*.down": "rowwise",
    f"model.{DEPTH + 1}.logits": "colwise_gather",
}


BOTH = {"sequence_parallel": True, "loss_parallel": True}
FOUND = {"plan": "auto"}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "2": (2, 2, {}),
    "4": (4, 4, {}),
    "2, sequence": (2, 2, {"sequence_parallel": True}),
    "2, plan found": (2, 2, FOUND),
    "2, loss": (2, 2, {"loss_parallel": True}),
    "2 replicas of 2, both": (4, 2, BOTH),
}


@pytest.mark.some("2, loss")
@pytest.mark.parametrize("case", CASES)
def test_equals_a_single_device(
    workers: WorkerPool, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    devices, tp_size, flags = CASES[case]
    options = {"tp_size": tp_size, **flags}
    results = workers.run(devices, fit_spread, devices, options)
    replicas = devices // tp_size
    check_equal(results, fit(1, "auto"), replicas, num_updates=10)


def fit_spread(devices: int, options: dict[str, Any]) -> Fitted:
    return fit(devices, TensorParallelStrategy(**{"plan": PLAN, **options}))


WAYS = {"fused": {"fused": True}, "foreach": {"foreach": True}}


def fit_by_groups(way: str) -> tuple[Fitted, Fitted]:
    """Updates what is sharded and what is not in one group, and a model of which all is sharded."""
    mixed = fit(2, TensorParallelStrategy(plan=PLAN), ways=WAYS[way])
    return mixed, fit(2, FSDPStrategy(), ways=WAYS[way])


@pytest.mark.some("fused")
@pytest.mark.parametrize("way", WAYS)
def test_groups_updated_at_once_equal_those_of_a_single_device(
    workers: WorkerPool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    single = fit(1, "auto", ways=WAYS[way])
    results = workers.run(2, fit_by_groups, way)
    check_equal([mixed for mixed, _ in results], single, 1, num_updates=10)
    check_equal([sharded for _, sharded in results], single, 2, num_updates=10)


class Keeping(GPT):
    """Clears gradients before each second update only, and looks at those that it keeps."""

    def __init__(self) -> None:
        super().__init__(width=32, depth=DEPTH, num_heads=4)
        self.seen: list[list[Tensor]] = []

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.global_step % 2 == 0:
            optimizer.zero_grad()

    def on_before_backward(self, loss: Tensor) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx % self.trainer.accumulate_grad_batches == 0:
            found = (p.grad for p in self.parameters() if p.grad is not None)
            self.seen.append([whole(gradient).clone() for gradient in found])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_keeping(devices: int, accumulated: int) -> tuple[dict[str, Tensor], list[list[Tensor]]]:
    torch.manual_seed(0)
    module = Keeping().double()
    sharded = TensorParallelStrategy(plan=PLAN, sequence_parallel=True)
    strategy: Any = sharded if devices > 1 else "auto"
    trainer = make_trainer(
        devices=devices, strategy=strategy, accumulate_grad_batches=accumulated, limit_val_batches=0
    )
    loader = DataLoader(data(32), batch_size=4)
    trainer.fit(module, loader, loader)
    return state_of(module), module.seen


@pytest.mark.some("2")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_kept_over_updates_count_once(workers: WorkerPool, accumulated: int) -> None:
    expected, expected_seen = fit_keeping(1, accumulated)
    assert [bool(kept) for kept in expected_seen] == [False, True] * (4 // accumulated)
    for state, seen in workers.run(2, fit_keeping, 2, accumulated):
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(seen, expected_seen, rtol=0, atol=1e-12)


def refusal(options: dict[str, Any]) -> str:
    module = make_gpt()

    def run() -> None:
        trainer = make_trainer(devices=2, strategy=TensorParallelStrategy(**options))
        loader = DataLoader(data(), batch_size=4)
        trainer.fit(module, loader, loader)

    with pytest.raises(ValueError, match=r".") as caught:
        run()
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tp_size": 3}, ["tp_size=3", "2 processes", "[1, 2]"]),
        ({"plan": {"*.attention.qvk": "colwise"}}, ["'*.attention.qvk'", "Did you mean"]),
        ({"plan": {"model.*.up": "columns"}}, ["'columns'", "colwise, colwise_gather"]),
        ({"plan": "all"}, ["plan='all'", "'auto'"]),
        ({"plan": {"model.*.mlp_norm": "colwise"}}, ["mlp_norm", "nn.Linear", "RMSNorm"]),
    ],
)
def test_bad_input_is_refused_alike(
    workers: WorkerPool, options: dict[str, Any], words: list[str]
) -> None:
    first, second = workers.run(2, refusal, options)
    assert first == second
    for word in words:
        assert word in first
