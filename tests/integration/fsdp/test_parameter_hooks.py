"""Hooks that come when parameters are sharded run as on one device, or are refused by name."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_dist import FSDPStrategy, MeshStrategy, TensorParallelStrategy
from tests.helpers.networks.models import (
    Classifier,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import CaseFailedError, WorkerPool

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "fsdp": FSDPStrategy,
    "keep": partial(FSDPStrategy, reshard_after_forward=False),
    "replicas": partial(FSDPStrategy, shard_size=1),
    "each": partial(FSDPStrategy, sync_every_microstep=True),
    "stages": partial(MeshStrategy, pp=2, dp_shard=2),
    "tensor": partial(TensorParallelStrategy, plan={"model.0": "colwise", "model.3": "rowwise"}),
}
DEVICES = {"stages": 4}


class Hooked(Classifier):
    """Gets a hook on its last layer in one of its own hooks."""

    def __init__(self, kind: str, where: str) -> None:
        super().__init__(depth=2)
        self.kind = kind
        self.num_calls = 0
        if where == "__init__":
            self.put()
        elif where == "training_step":
            own = self.training_step

            def step(*arguments: Any) -> Tensor:
                self.put()
                return own(*arguments)

            self.training_step = step
        else:
            setattr(self, where, self.put)

    def put(self, *_: Any) -> None:
        weight = dict(self.named_parameters()).get("model.3.weight")
        if weight is None:  # another stage has it
            return
        if self.kind == "before":
            weight.register_hook(lambda gradient: 0.5 * gradient)
        else:
            weight.register_post_accumulate_grad_hook(self.shrink)

    def shrink(self, parameter: nn.Parameter) -> None:
        self.num_calls += 1
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


def fit(name: str, kind: str, where: str, accumulate: int = 1, devices: int = 2) -> Any:
    strategy: Any = "auto" if name == "one" else STRATEGIES[name]()
    module = make_module(Hooked, kind=kind, where=where)
    trainer = make_trainer(devices=devices, strategy=strategy, accumulate_grad_batches=accumulate)
    trainer.fit(module, make_loader(32), make_loader(8))
    return state_of(module), module.num_calls


def refusal(*arguments: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller matches the text)
        fit(*arguments)
    return str(caught.value)


@pytest.mark.some(
    "fsdp-on_train_batch_end", "fsdp-training_step", "replicas-__init__", "stages-on_train_start"
)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("fsdp", "on_fit_start"),
        ("keep", "on_train_start"),
        ("fsdp", "on_train_batch_end"),
        ("fsdp", "training_step"),
        ("replicas", "__init__"),
        ("replicas", "on_train_start"),
        ("stages", "on_train_start"),
    ],
)
def test_hooks_before_gradients_are_complete_are_refused(
    workers: WorkerPool, name: str, where: str
) -> None:
    devices = DEVICES.get(name, 2)
    # Of stages one has the parameter, and the other's processes may be ended in a collective.
    with pytest.raises(CaseFailedError) as raised:
        workers.run(devices, fit, name, "before", where, 1, devices)
    for rank in range(devices):
        assert f"rank {rank}:" in str(raised.value)
    assert str(raised.value).count("ValueError: The parameter 'model.3.weight' has a hook") >= 1


@pytest.mark.some("each-*", "fsdp-on_train_batch_end-1")
@pytest.mark.parametrize(
    ("name", "where", "accumulate"),
    [
        ("fsdp", "on_train_start", 1),
        ("fsdp", "on_train_batch_end", 1),
        ("each", "on_train_start", 2),
        ("stages", "on_train_start", 1),
    ],
)
def test_hooks_on_complete_gradients_run_as_on_one_device(
    workers: WorkerPool, name: str, where: str, accumulate: int
) -> None:
    devices = DEVICES.get(name, 2)
    ((expected, calls),) = workers.run(1, fit, "one", "behind", where, accumulate, 1)
    states = workers.run(devices, fit, name, "behind", where, accumulate, devices)
    found = {key: value for state, _ in states for key, value in state.items()}
    assert max(number for _, number in states) == calls
    for key, value in expected.items():
        assert float((found[key] - value).abs().max()) < 1e-12, key


def test_hooks_on_gradients_that_are_complete_once_for_several_batches_are_refused(
    workers: WorkerPool,
) -> None:
    for text in workers.run(2, refusal, "fsdp", "behind", "on_train_start", 2):
        assert "sync_every_microstep=True" in text


def refusal_of_rank_zeros(name: str) -> str:
    module = make_module(Classifier, depth=2)
    if os.environ["RANK"] == "0":  # as `WandbLogger.watch` does
        module.get_parameter("model.3.weight").register_hook(lambda _: None)
    trainer = make_trainer(devices=2, strategy=STRATEGIES[name]())
    with pytest.raises(ValueError) as caught:  # noqa: PT011  (the caller matches the text)
        trainer.fit(module, make_loader(32), make_loader(8))
    return str(caught.value)


@pytest.mark.parametrize("name", ["fsdp", "tensor"])
def test_hooks_of_rank_zero_alone_are_refused_on_all_ranks(workers: WorkerPool, name: str) -> None:
    for text in workers.run(2, refusal_of_rank_zeros, name):
        assert text.startswith("The parameter 'model.3.weight' has a hook on rank 0, and none")
