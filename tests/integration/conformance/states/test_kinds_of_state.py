"""Whatever an optimizer keeps of a parameter is saved, and resumed by any layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_dist import FSDPStrategy, MeshStrategy
from lightning_dist.engine.tensors.dtensor import from_shard, local_part
from tests.helpers.networks.models import make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import Synced, assert_close, joined, share
from tests.integration.conformance.strategies import ENTRIES, Entry

SINGLE = "one device"
NAMES = ("fsdp-2", "tp-2", "shard-2-tp-2", "pp-2-shard-2", "pipeline-gpipe-2", "ddp-2")
LAYOUTS = {
    **{name: ENTRIES[name] for name in NAMES},
    "fsdp-2-full": Entry(2, 2, partial(FSDPStrategy, save_full=True)),
    "pp-2-shard-2-full": Entry(4, 2, partial(MeshStrategy, pp=2, save_full=True)),
}


def by_a_dict(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Aggregates momenta (AggMo)."""
    if not state:
        state["momenta"] = {beta: torch.zeros_like(gradient) for beta in (0.0, 0.5, 0.9)}
    for beta, momentum in state["momenta"].items():
        momentum.mul_(beta).add_(gradient)
    return sum(state["momenta"].values(), torch.zeros_like(gradient)) / 3


def by_a_list(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Sums the last gradients."""
    state["last"] = [*state.get("last", [])[-1:], gradient.clone()]
    return sum(state["last"], torch.zeros_like(gradient))


def by_a_number(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Divides by a mean size of all of a parameter's gradient (NovoGrad)."""
    state["size"] = state.get("size", 0.0) * 0.9 + gradient.square().sum() * 0.1
    return gradient / (state["size"].sqrt() + 0.1)


def by_rows(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Divides by a mean size of each row of the gradient."""
    square = gradient.square()
    dims = tuple(range(1, gradient.ndim))
    mean = square.mean(dims, keepdim=True) if dims else square
    state["size"] = state["size"] * 0.9 + mean * 0.1 if state else mean
    return gradient / (state["size"].sqrt() + 0.1)


def by_columns(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Divides by a mean size of each column of the gradient, which is updated in place."""
    mean = gradient.square().mean(0)
    if gradient.ndim == 1:
        return gradient
    state.setdefault("size", torch.zeros_like(mean)).mul_(0.9).add_(mean, alpha=0.1)
    return gradient / (state["size"].sqrt() + 0.1)


def by_own_shards(state: dict[str, Any], gradient: Tensor) -> Tensor:
    """Keeps a plain tensor for this rank's shard of the gradient."""
    momentum = state.setdefault("momentum", torch.zeros_like(local_part(gradient)))
    momentum.mul_(0.9).add_(local_part(gradient))
    return from_shard(momentum, gradient)


KINDS = {
    "a dict": by_a_dict,
    "a list": by_a_list,
    "a number": by_a_number,
    "rows": by_rows,
    "columns": by_columns,
}
ALL_KINDS = {**KINDS, "own shards": by_own_shards}


class Keeping(torch.optim.Optimizer):
    """Descends in a direction that is made from a parameter's gradient and state."""

    def __init__(self, parameters: Any, kind: str) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.direction = ALL_KINDS[kind]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                direction = self.direction(self.state[parameter], parameter.grad)
                parameter.sub_(direction, alpha=group["lr"])
        return loss


class Kept(Synced):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return Keeping(self.parameters(), self.kind)


def fit(name: str, kind: str, epochs: int, resume: str | None) -> tuple[L.Trainer, Kept]:
    module, entry = make_module(Kept, kind=kind), LAYOUTS.get(name)
    trainer = make_trainer(
        devices=entry.devices if entry else 1,
        strategy=entry.make() if entry else "auto",
        max_epochs=epochs,
    )
    loaders = share(trainer, entry, 16), share(trainer, entry, 8)
    trainer.fit(module, *loaders, ckpt_path=resume, weights_only=True)
    return trainer, module


def train(
    name: str, epochs: int, resume: str | None, save: str | None
) -> dict[str, dict[str, Tensor]]:
    """Gives the parameters in the end, by the kind of state."""
    found = {}
    for number, kind in enumerate(KINDS):
        trainer, module = fit(name, kind, epochs, resume and f"{resume}.{number}")
        if save is not None:
            trainer.save_checkpoint(f"{save}.{number}")
        found[kind] = state_of(module)
    return found


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)  # a single device's trainer reads it


@cache
def uninterrupted() -> dict[str, dict[str, Tensor]]:
    return train(SINGLE, 2, None, None)


def run(workers: WorkerPool, name: str, *options: Any) -> list[dict[str, dict[str, Tensor]]]:
    if name == SINGLE:
        return [train(name, *options)]
    return workers.run(LAYOUTS[name].devices, train, name, *options)


@pytest.mark.some("fsdp-2-fsdp-2", "tp-2-fsdp-2-full")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp-2", "fsdp-2"),
        ("fsdp-2", "tp-2"),
        ("tp-2", "fsdp-2-full"),
        ("fsdp-2-full", "shard-2-tp-2"),
        ("shard-2-tp-2", "pipeline-gpipe-2"),
        ("pipeline-gpipe-2", "pp-2-shard-2-full"),
        ("pp-2-shard-2-full", SINGLE),
        (SINGLE, "pp-2-shard-2"),
        ("pp-2-shard-2", "ddp-2"),
        ("ddp-2", "fsdp-2"),
    ],
)
def test_resumes_under_any_layout(
    workers: WorkerPool, tmp_path: Path, before: str, after: str
) -> None:
    path = str(tmp_path / "some.ckpt")
    run(workers, before, 1, None, path)
    ranks = run(workers, after, 2, path, None)
    for kind, expected in uninterrupted().items():
        assert_close(joined([rank[kind] for rank in ranks]), expected)


def save_own_shards(name: str, path: str) -> str:
    trainer, _ = fit(name, "own shards", 1, None)
    with pytest.raises(ValueError, match="Keeping keeps a plain tensor") as error:
        trainer.save_checkpoint(path)
    return str(error.value)


@pytest.mark.some("fsdp-2", "pp-2-shard-2")
@pytest.mark.parametrize("name", ["fsdp-2", "fsdp-2-full", "pp-2-shard-2", "tp-2"])
def test_plain_tensors_for_own_shards_are_refused_on_all_ranks(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "some.ckpt"
    ranks = workers.run(LAYOUTS[name].devices, save_own_shards, name, str(path))
    (message,) = set(ranks)
    assert "for 'model.0." in message
    assert not path.exists()


def save_own_state(path: str) -> None:
    trainer, _ = fit("ddp-2", "own shards", 1, None)
    trainer.save_checkpoint(path)


def test_those_for_whole_parameters_are_saved(workers: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "some.ckpt"
    workers.run(2, save_own_state, str(path))
    assert path.exists()
