"""What servers cannot train is a ValueError on each rank, before anything hangs."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from lightning_dist import FSDPStrategy, ParameterServerStrategy
from lightning_dist.callbacks import MixedPrecision
from tests.helpers.networks.models import (
    Classifier,
    make_data,
    make_loader,
    make_module,
    make_trainer,
)
from tests.helpers.processes.workers import WorkerPool


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


class Whole(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Few(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([self.model[-1].bias], lr=0.1)


class Estimating(Classifier):
    """Has an optimizer with an estimate in its groups, of the gradients that it sees."""

    def configure_optimizers(self) -> Any:
        return Estimate(self.parameters(), {"lr": 0.1, "seen": 0.0})


class Estimate(torch.optim.Optimizer):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["seen"] += sum(float(p.grad.abs().sum()) for p in group["params"])


class Keeping(Classifier):
    def configure_optimizers(self) -> Any:
        return Lists(self.parameters(), lr=0.1)


class Clamping(Classifier):
    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.model[-1].weight.clamp_(-0.1, 0.1)


class Hooked(Classifier):
    """Adds a hook where the optimizer is made, or later."""

    def __init__(self, *, late: bool = False) -> None:
        super().__init__()
        self.late = late

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if not self.late:
            optimizer.register_step_pre_hook(halve)
        return optimizer

    def on_train_start(self) -> None:
        if self.late:
            self.trainer.optimizers[0].register_step_post_hook(halve)


class HookedLate(Hooked):
    def __init__(self) -> None:
        super().__init__(late=True)


def halve(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.mul_(0.5)


class Switching(Classifier):
    def on_train_epoch_start(self) -> None:
        self.trainer.optimizers = [torch.optim.SGD(self.parameters(), lr=0.0)]


class Thawing(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model[1:].parameters(), lr=0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": [*self.model[0].parameters()]})


class Lists(torch.optim.SGD):
    """Keeps copies of all parameters in a list."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        self.copies = [p.detach().clone() for g in self.param_groups for p in g["params"]]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(make_data(16))


CASES: dict[str, tuple[type[Classifier], dict[str, Any], dict[str, Any], str]] = {
    "manual": (Manual, {}, {}, "automatic_optimization=False does not go"),
    "sparse": (Sparse, {}, {}, r"gradients of \['table'\] are sparse, and servers"),
    "LBFGS": (Whole, {}, {}, "LBFGS lays all parameters out as one vector"),
    "few": (Few, {"num_servers": 2}, {}, "num_servers=2 are more than the optimizer's 1 param"),
    "estimate": (Estimating, {"num_servers": 2}, {}, "Estimate keeps one estimate.*num_servers=1"),
    "lists": (
        Keeping,
        {"num_servers": 2},
        {},
        r"Lists keeps a list.*A server.*state\[p\]",
    ),
    "step hook": (Hooked, {}, {}, r"SGD has step hooks, \['halve'\], and steps at a server"),
    "late hook": (HookedLate, {}, {}, r"SGD has step hooks, \['halve'\], and steps at a server"),
    "switched": (Switching, {}, {}, "replaced the optimizer by another SGD"),
    "thawed": (Thawing, {"num_servers": 2}, {}, "no server has.*`on_train_epoch_start`"),
    "fp16": (Classifier, {}, {"callbacks": "fp16"}, "fp16 with a loss scale leaves out steps"),
    "batch norm": (
        Classifier,
        {"mode": "async"},
        {"sync_batchnorm": True},
        "Synchronised BatchNorm waits in its forward for all ranks",
    ),
    "shards": (Classifier, {}, {}, "The module is sharded already, .* whole parameters"),
    "written": (Clamping, {"mode": "async"}, {}, "written into the weights between two batches"),
    "length": (Classifier, {"mode": "async"}, {}, "mode='async' needs training loaders of known"),
}


def attempt(name: str, path: str) -> tuple[str, str]:
    module, arguments, options, _ = CASES[name]
    built = make_module(module)
    if options.get("callbacks") == "fp16":
        options, built = {"callbacks": [MixedPrecision("fp16")]}, built.float()
    loader: Any = make_loader(16)
    if name == "length":
        loader = torch.utils.data.DataLoader(Endless(), batch_size=8)
    if name == "shards":
        make_trainer(devices=2, strategy=FSDPStrategy(timeout_s=20.0)).fit(built, loader, loader)
    try:
        strategy = ParameterServerStrategy(timeout_s=20.0, **arguments)
        trainer: L.Trainer = make_trainer(devices=2, strategy=strategy, **options)
        trainer.fit(built, loader, make_loader(8))
        trainer.save_checkpoint(path)
    except BaseException as error:
        return type(error).__name__, str(error).splitlines()[0]
    return "nothing", ""


@pytest.mark.some("few", "late hook", "switched", "thawed")
@pytest.mark.parametrize("name", CASES)
def test_is_refused_on_each_rank(workers: WorkerPool, name: str, tmp_path: Any) -> None:
    answers = workers.run(2, attempt, name, str(tmp_path / "x.ckpt"))
    ranks = answers[:1] if name == "estimate" else answers  # the first rank writes the checkpoint
    for kind, text in ranks:
        assert kind == "ValueError", (kind, text)
        with pytest.raises(ValueError, match=CASES[name][-1]):
            raise ValueError(text)


def test_more_servers_than_ranks() -> None:
    with pytest.raises(ValueError, match=r"num_servers=3 does not fit 1 ranks.*num_servers=1"):
        make_trainer(devices=1, strategy=ParameterServerStrategy(num_servers=3))
