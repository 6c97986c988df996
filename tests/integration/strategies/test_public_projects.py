"""What LightningModules of public projects do works as on one device.

Each case is the core of code that was found in tutorials, templates and libraries.
"""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, MetricCollection

from lightning_dist import DDPStrategy, FSDPStrategy, MeshStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.networks.models import make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Any] = {
    "one": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "fsdp-full": lambda: FSDPStrategy(save_full=True),
    "mesh": lambda: MeshStrategy(dp_replicate=2, dp_shard=1),
    "pipe": PipelineStrategy,
    "pipedream": lambda: PipelineStrategy(schedule="pipedream"),
}


def trainer_of(name: str, **options: Any) -> L.Trainer:
    return make_trainer(devices=1 if name == "one" else 2, strategy=STRATEGIES[name](), **options)


def loader(size: int = 8, num_samples: int = 32, width: int = 6) -> DataLoader[Any]:
    x = torch.randn(num_samples, width, generator=torch.Generator().manual_seed(3)).double()
    return DataLoader(TensorDataset(x, x[:, :1] * x[:, 1:2]), batch_size=size)


class Regression(L.LightningModule):
    """Fits a network by the mean squared error."""

    net: nn.Module

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


# --- among the hyperparameters -------------------------------------------------------------------


class Template(Regression):
    """Takes its network and its metric as arguments, and saves them with all others."""

    def __init__(self, net: nn.Module, metric: MeanSquaredError, lr: float = 0.1) -> None:
        super().__init__()
        with warnings.catch_warnings():  # Lightning's, that the network is saved twice
            warnings.simplefilter("ignore")
            self.save_hyperparameters(logger=False)
        self.net, self.metric = net, metric
        self.best: Any = None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.metric(self.net(batch[0]), batch[1])
        self.log("val", self.metric)

    def on_validation_epoch_end(self) -> None:
        copies = MetricCollection({"a": self.metric}).clone(prefix="copy_")
        self.best = copy.deepcopy(self.metric)
        assert {*copies} == {"copy_a"}


def make_template() -> Template:
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return Template(net, MeanSquaredError()).double()


def fit_template(name: str, folder: str) -> tuple[dict[str, Tensor], float, bool]:
    module = make_template()
    sync = name in ("ddp", "mesh", "fsdp", "fsdp-full")
    trainer = trainer_of(name, sync_batchnorm=sync)
    trainer.fit(module, loader(), loader())
    value = float(trainer.callback_metrics["val"])
    path = f"{folder}/saved.ckpt"
    trainer.save_checkpoint(path)
    if trainer.world_size > 1:
        trainer.strategy.barrier()
    options: Any = {"weights_only": False, "verbose": False}
    with warnings.catch_warnings():  # Lightning's, that it leaves out what cannot be pickled
        warnings.simplefilter("ignore")
        (again,) = trainer.validate(module, loader(), ckpt_path=path, **options)
    assert module.hparams["net"] is module.net
    assert again["val"] == pytest.approx(value, rel=1e-9)
    load: Any = load_full if os.path.isdir(path) else torch.load
    saved = load(path, weights_only=False)
    kept = saved["hyper_parameters"]
    assert kept["lr"] == 0.1
    assert type(kept["net"]) is nn.Sequential
    assert type(kept["net"][1]) is nn.BatchNorm1d
    built = Template(**kept)
    is_filled = all(torch.isfinite(p).all() for p in built.parameters())
    if is_filled:
        assert all(torch.equal(v, saved["state_dict"][n]) for n, v in built.state_dict().items())
    built.load_state_dict(saved["state_dict"])
    kept["metric"](torch.ones(2), torch.zeros(2))
    assert kept["metric"].compute() > 0
    assert module.metric.dist_sync_fn is None  # as before the run
    return {n: v.clone() for n, v in built.state_dict().items()}, value, is_filled


@pytest.mark.some("fsdp", "fsdp-full", "pipe", "ddp")
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp-full", "mesh", "pipe"])
def test_networks_and_metrics_among_hyperparameters(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    folders = [tmp_path / part for part in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    ((expected, value, _),) = workers.run(1, fit_template, "one", str(folders[0]))
    for found, other, is_filled in workers.run(2, fit_template, name, str(folders[1])):
        assert is_filled == (name not in ("fsdp", "pipe"))  # whose files have a part each
        assert expected.keys() == found.keys()
        # The others read each sample twice, so a variance of n - 1 samples is another.
        same = expected.keys() if name == "pipe" else expected.keys() - {"net.1.running_var"}
        for key in same:
            torch.testing.assert_close(found[key], expected[key], rtol=1e-9, atol=1e-12)
        assert name != "pipe" or other == pytest.approx(value, rel=1e-9)


# --- traced models -------------------------------------------------------------------------------


class OwnState(nn.Linear):
    """Writes its tensors into state dicts by itself, as torch_geometric's linear layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in ("weight", "bias"):
            tensor = getattr(self, name)
            destination[prefix + name] = tensor if keep_vars else tensor.detach()


class Branches(nn.Module):
    """No sequence, with BatchNorm: like a network of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = OwnState(6, 8), nn.BatchNorm1d(8), OwnState(8, 8)
        self.norm2, self.c = nn.BatchNorm1d(8), OwnState(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.a(x)))
        result: Tensor = self.c(hidden + F.relu(self.norm2(self.b(hidden))))
        return result


class Traced(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = Branches()

    def forward(self, batch: Any) -> Any:
        return self.net(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.net(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", F.mse_loss(self.net(batch[0]), batch[1]))


def fit_test_and_predict(name: str, folder: str) -> tuple[float, float, Tensor]:
    best = ModelCheckpoint(folder, monitor="val_loss")
    trainer = trainer_of(name, callbacks=[best], max_epochs=2, enable_checkpointing=True)
    module = make_module(Traced)
    trainer.fit(module, loader(), loader())
    (validated,) = trainer.validate(module, loader(), verbose=False)
    (tested,) = trainer.test(module, loader(), ckpt_path="best", verbose=False)
    predicted: Any = trainer.predict(module, loader())  # by Lightning's own step
    return validated["val_loss"], tested["test_loss"], torch.cat(predicted)


def test_a_traced_model_is_tested_by_its_best_checkpoint(
    workers: WorkerPool, tmp_path: Path
) -> None:
    ((validated, tested, predicted),) = workers.run(
        1, fit_test_and_predict, "one", str(tmp_path / "one")
    )
    found = workers.run(2, fit_test_and_predict, "pipe", str(tmp_path / "two"))
    for own_validated, own_tested, own_predicted in found:
        assert own_validated == pytest.approx(validated, rel=1e-9)
        assert own_tested == pytest.approx(tested, rel=1e-9)
        torch.testing.assert_close(own_predicted, predicted, rtol=1e-9, atol=1e-12)


class Whole(L.LightningModule):
    """Its own forward is the model, which is traced as a whole; predicts by Lightning's step."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 8), nn.Linear(2, 6)
        self.mean, self.spread = nn.Linear(8, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Any:
        x = x[0] if isinstance(x, list) else x
        hidden = self.encode(x).tanh()
        found = Normal(self.mean(hidden), F.softplus(self.spread(hidden)))
        return self.decode(found.mean), found.loc, found.scale

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out, loc, scale = self(batch[0])
        prior = Normal(torch.zeros_like(loc), torch.ones_like(scale))
        return F.mse_loss(out, batch[0]) + kl_divergence(Normal(loc, scale), prior).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Headed(nn.Module):
    """Computes its loss where it has targets, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Branches()

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        result = self.body(x)
        if target is None:
            return {"result": result}
        return {"result": result, "loss": F.mse_loss(result, target)}


class WithHead(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = Headed()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(*batch)["loss"]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(*batch)["loss"])

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0])["result"]


def fit_and_predict(name: str) -> Tensor:
    trainer, module = trainer_of(name, max_epochs=1), make_module(WithHead)
    trainer.fit(module, loader(), loader())
    predicted: Any = trainer.predict(module, loader())
    trainer.validate(module, loader(), verbose=False)
    return torch.cat([*predicted, trainer.callback_metrics["val_loss"].reshape(1, 1)])


def test_a_traced_model_may_be_called_without_targets(workers: WorkerPool) -> None:
    (expected,) = workers.run(1, fit_and_predict, "one")
    for found in workers.run(2, fit_and_predict, "pipe"):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class Residual(Regression):
    """All parameters are in a list, which is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("share", torch.tensor(0.5))  # of the first stage
        blocks = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x, total = x * self.share, torch.zeros_like(x)
        for block in self.blocks:
            part = block(x)
            total, x = total + part, x - part
        return total

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()


def fit_any(name: str, kind: type[L.LightningModule]) -> dict[str, Tensor]:
    module = make_module(kind)
    trainer_of(name).fit(module, loader())
    return state_of(module)


@pytest.mark.parametrize("kind", [Whole, Residual])
def test_modules_that_are_traced_as_a_whole(
    workers: WorkerPool, kind: type[L.LightningModule]
) -> None:
    (expected,) = workers.run(1, fit_any, "one", kind)
    first, second = workers.run(2, fit_any, "pipe", kind)
    assert {**first, **second}.keys() == expected.keys()
    for key, tensor in {**first, **second}.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-9, atol=1e-12)


# --- batches that are whole ----------------------------------------------------------------------


class Contrastive(Regression):
    """Its loss is one of pairs in the batch, in evaluations too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))

    def _loss(self, batch: Any) -> Tensor:
        z = F.normalize(self.net(torch.cat([batch[0], batch[0] + 0.1])), dim=1)
        same = torch.eye(len(z), dtype=torch.bool)
        half = torch.arange(len(z)).roll(len(z) // 2)
        return F.cross_entropy((z @ z.T / 0.5).masked_fill(same, -1e9), half)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))


def validate_inside_and_outside(name: str, lr: float) -> list[float]:
    trainer, module = trainer_of(name), make_module(Contrastive)
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=lr)
    (before,) = trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader(), loader())
    inside = float(trainer.callback_metrics["val_loss"])
    module.eval()
    (behind,) = trainer.validate(module, loader(), verbose=False)
    return [before["val_loss"], inside, behind["val_loss"]]


@pytest.mark.some("pipedream-0.0")
@pytest.mark.parametrize(("name", "lr"), [("pipe", 0.1), ("pipedream", 0.0)])
def test_evaluations_leave_batches_as_whole_as_training_does(
    workers: WorkerPool, name: str, lr: float
) -> None:
    (expected,) = workers.run(1, validate_inside_and_outside, "one", lr)
    for found in workers.run(2, validate_inside_and_outside, name, lr):
        assert found == pytest.approx(expected, rel=1e-9)


# --- loggers that draw the graph -----------------------------------------------------------------


class Drawn(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        self.example_input_array = torch.zeros(2, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]))


def fit_drawn(name: str, folder: str) -> bool:
    logger = TensorBoardLogger(folder, name=name, version=0, log_graph=True)
    with warnings.catch_warnings():  # TensorBoard's way to draw is deprecated
        warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
        module = make_module(Drawn)
        for _ in range(2):  # the second time the module is in parts
            trainer = trainer_of(name, logger=logger)
            trainer.fit(module, loader(), loader())
        trainer.validate(module, loader(), verbose=False)
    assert "log_graph" not in vars(logger)  # Lightning's own again
    return trainer_has_graph(folder, name)


def trainer_has_graph(folder: str, name: str) -> bool:
    return bool(EventAccumulator(f"{folder}/{name}/version_0").Reload().Tags()["graph"])


@pytest.mark.some("fsdp")
@pytest.mark.parametrize("name", ["pipe", "fsdp", "mesh"])
def test_the_graph_is_logged(workers: WorkerPool, tmp_path: Path, name: str) -> None:
    workers.run(2, fit_drawn, name, str(tmp_path))
    assert trainer_has_graph(str(tmp_path), name)
