"""Networks among hyperparameters are saved with the checkpoint's values."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import MeanSquaredError

from lightning_dist.strategies.base.saving.saved_modules import SavedModules, saved_modules_of

KEY = pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY


class Part(nn.Module):
    """Has a tied weight, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.register_buffer("steps", torch.tensor(4))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)), persistent=False)


class Holder(pl.LightningModule):
    def __init__(
        self, net: nn.Module, parts: list[nn.Module], beside: nn.Module, lr: float
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.save_hyperparameters()
        self.net, self.parts = net, nn.ModuleList(parts)


def make() -> Holder:
    return Holder(Part(), [nn.Linear(2, 2)], nn.Linear(1, 1), lr=0.1)


def spoil(module: nn.Module) -> None:
    """Makes a module one that cannot be pickled."""
    for part in module.modules():
        vars(part)["spoilt"] = lambda: None


def saved(module: Holder, state: dict[str, Any]) -> dict[str, Any]:
    checkpoint = {KEY: dict(module.hparams), "state_dict": state}
    found = saved_modules_of(module).put_into(checkpoint, state)
    assert checkpoint[KEY]["net"] is module.net
    loaded: dict[str, Any] = pickle.loads(pickle.dumps(found[KEY]))
    return loaded


def test_networks_get_the_values_of_the_checkpoint() -> None:
    module = make()
    saved_modules_of(module)
    state = {name: value + 1 for name, value in module.state_dict().items()}
    spoil(module.net)
    spoil(module.parts)
    found = saved(module, state)
    net, (part,) = found["net"], found["parts"]
    assert found["lr"] == 0.1
    assert net.first.weight is net.last.weight
    assert torch.equal(net.first.weight, state["net.first.weight"])
    assert net.first.weight.requires_grad
    assert net.steps == 5
    assert torch.equal(net.mask, module.net.mask)
    assert torch.equal(part.weight, state["parts.0.weight"])
    assert torch.equal(found["beside"].weight, module.hparams["beside"].weight)  # is no part


class Weighted(MeanSquaredError):
    """Shows a buffer, as chemprop's metrics do, and torchmetrics asks for that when it copies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0]))

    def extra_repr(self) -> str:
        return str(self.weights.tolist())


def test_a_metric_may_show_its_buffers() -> None:
    module = Holder(Part(), [Weighted()], nn.Linear(1, 1), lr=0.1)
    saved_modules_of(module)
    state = {name: value + 1 for name, value in module.state_dict().items()}
    (metric,) = saved(module, state)["parts"]
    assert metric.weights.tolist() == [2.0, 3.0]
    assert metric.extra_repr() == "[2.0, 3.0]"


def test_values_that_are_not_at_hand_are_seen() -> None:
    module = make()
    saved_modules_of(module)
    spoil(module.net)
    spoil(module.parts)
    net = saved(module, {})["net"]
    assert torch.isnan(net.first.weight).all()
    net.load_state_dict(module.net.state_dict())
    assert torch.equal(net.first.weight, module.net.first.weight)


def test_what_lightning_has_removed_is_restored() -> None:
    module = make()
    held = saved_modules_of(module)
    assert saved_modules_of(copy.deepcopy(module)) is held
    del module.hparams["net"], module.hparams["lr"]
    held.restore(module)
    assert module.hparams["net"] is module.net
    assert "lr" not in module.hparams


def test_a_module_without_networks_is_not_looked_at() -> None:
    class Plain(pl.LightningModule):
        def state_dict(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("nothing to save here")

    checkpoint = {"state_dict": {}}
    assert SavedModules(Plain()).put_into(checkpoint, {}) is checkpoint
