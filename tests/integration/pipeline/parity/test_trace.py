"""Modules that are no sequence, cut by a trace, give what a single device gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

from lightning_dist import PipelineStrategy
from tests.helpers.networks.chosen import chosen
from tests.helpers.networks.models import make_module, make_optimizer, make_trainer, state_of
from tests.helpers.networks.traced_models import Pair, ResNet, Task, UNet, make_images
from tests.helpers.processes.workers import WorkerPool

TOLERANCE = 1e-12


class Measured(Pair):
    """Holds a metric and a collection, which wrap methods of theirs anew in each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError().set_dtype(torch.float64)
        both = MetricCollection([MeanSquaredError(), MeanAbsoluteError()], prefix="val_")
        self.errors = both.set_dtype(torch.float64)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        image = self(x, level=y[:, 0, 0])["image"]
        self.error(image, y)
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        return F.mse_loss(image, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.errors.update(self(x, level=y[:, 0, 0])["image"], y)
        self.log_dict(self.errors)


MODULES: dict[str, tuple[type[Task], dict[str, Any]]] = {
    "unet": (Task, {"net": UNet}),
    "resnet": (Task, {"net": ResNet}),
    "pair": (Pair, {}),
    "measured": (Measured, {}),
}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "unet 1f1b": ("unet", {"schedule": "1f1b", "num_microbatches": 2, "save_full": True}),
    "unet zbv": ("unet", {"schedule": "zbv", "num_microbatches": 3}),
    "unet interleaved": ("unet", {"schedule": "interleaved_1f1b", "num_microbatches": 2}),
    # The batch is one micro-batch, or its norms would see other samples than a single device's.
    "resnet 1f1b": ("resnet", {"schedule": "1f1b", "num_microbatches": 1}),
    "pair gpipe": ("pair", {"schedule": "gpipe", "num_microbatches": 3}),
    "measured 1f1b": ("measured", {"schedule": "1f1b", "num_microbatches": 2}),
}


def build(name: str) -> Any:
    class_, arguments = MODULES[name]
    return make_module(class_, **arguments)


def fit(
    name: str,
    devices: int,
    strategy: dict[str, Any] | None,
    epochs: int = 1,
    save: str | None = None,
    resume: str | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Trains, and validates again in a run of its own, on the model that the first has cut."""
    module = build(name)
    asked = "auto" if strategy is None else PipelineStrategy(layers="trace", **strategy)
    trainer = make_trainer(devices=devices, strategy=asked, max_epochs=epochs)
    trainer.fit(module, make_images(), make_images(8), ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    (validated,) = trainer.validate(module, make_images(8), verbose=False)
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return {**state_of(module), **buffers}, metrics | validated


def fit_stale() -> dict[str, Tensor]:
    module = build("unet")
    strategy = PipelineStrategy(layers="trace", schedule="pipedream", partition=[2, 4])
    trainer = make_trainer(
        devices=2, strategy=strategy, max_epochs=2, limit_val_batches=1, num_sanity_val_steps=0
    )
    trainer.fit(module, make_images(16), make_images(4))
    return state_of(module)


def fit_all(names: set[str], path: str) -> dict[str, Any]:
    runs = {
        run: fit(name, 2, strategy, save=path if strategy.get("save_full") else None)
        for run, (name, strategy) in RUNS.items()
        if run in names
    }
    return {**runs, "stale": fit_stale()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("traced") / "last.ckpt")


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, workers: WorkerPool, checkpoint: str
) -> list[dict[str, Any]]:
    # The first one saves the checkpoint that other tests read.
    names = {next(iter(RUNS)), *chosen(request.session, "trained", "run", request.path)}
    return workers.run(2, fit_all, names, checkpoint, timeout=240.0)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def assert_equal(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, value in expected.items():
        found = [state[name] for state in ranks if name in state]
        assert found, name
        for actual in found:
            assert float((actual - value).abs().max()) < TOLERANCE, name


@pytest.mark.some("unet 1f1b", "measured 1f1b")
@pytest.mark.parametrize("run", RUNS)
def test_equals_a_single_device(trained: list[dict[str, Any]], run: str) -> None:
    state, metrics = fit(RUNS[run][0], 1, None)
    ranks = [rank[run] for rank in trained]
    assert_equal([held for held, _ in ranks], state)
    for held, known in ranks:
        assert known == pytest.approx(metrics, abs=TOLERANCE)
        assert held.keys() < state.keys(), "no rank holds all of it"


def test_a_checkpoint_resumes_on_a_single_device(
    trained: list[dict[str, Any]], checkpoint: str
) -> None:
    resumed, _ = fit("unet", 1, None, epochs=2, resume=checkpoint)
    uninterrupted, _ = fit("unet", 1, None, epochs=2)
    assert_equal([resumed], uninterrupted)


def test_stale_stages_equal_a_sequential_loop(trained: list[dict[str, Any]]) -> None:
    """With two stages, the first one's weights are an update behind the second one's."""
    module = build("unet")
    optimizer = make_optimizer("adamw", module.parameters())
    versions = [weights_of(module.net)]
    first = {"down.weight", "down.bias", "norm.weight", "norm.bias"}
    for _ in range(2):
        for b, (x, y) in enumerate(make_images(16)):
            older = versions[-1 if b == 0 else -2]  # an epoch's end drains
            used = {n: (older if n in first else versions[-1])[n] for n in versions[-1]}
            loss = F.mse_loss(torch.func.functional_call(module.net, used, x), y)
            gradients = torch.autograd.grad(loss, list(used.values()))
            for parameter, gradient in zip(module.net.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()
            versions.append(weights_of(module.net))
    assert_equal([rank["stale"] for rank in trained], state_of(module))


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone().requires_grad_() for n, p in net.named_parameters()}


class Wide(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0][..., 1]).sum()


class Penalised(Task):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


def attempt(class_: type[Task]) -> str:
    strategy = PipelineStrategy(layers="trace", num_microbatches=2)
    try:
        trainer = make_trainer(devices=2, strategy=strategy, num_sanity_val_steps=0)
        trainer.fit(make_module(class_), make_images(), make_images(8))
    except ValueError as error:
        return str(error).splitlines()[0]
    return ""


def name_a_traced_module() -> str:
    """Trains a module as layers="auto" finds it, and then names it as what it is not."""
    module = make_module(Task)
    for layers in ("auto", "net"):
        strategy = PipelineStrategy(layers=layers, num_microbatches=2)
        trainer = make_trainer(devices=2, strategy=strategy, num_sanity_val_steps=0, max_epochs=1)
        try:
            trainer.fit(module, make_images(), make_images(8))
        except ValueError as error:
            return f"{layers}: {error}"
    return ""


def test_a_path_wins_over_an_earlier_trace(workers: WorkerPool) -> None:
    for refusal in workers.run(2, name_a_traced_module):
        assert refusal.startswith("net: Leave out `layers=`, or name an `nn.Sequential`"), refusal


def test_another_input_is_refused_alike_on_each_rank(workers: WorkerPool) -> None:
    first, second = workers.run(2, attempt, Wide)
    assert first == second
    assert first.startswith("x has shape (2, 1, 8) and torch.float64"), first


def test_a_penalty_on_all_parameters_is_refused(workers: WorkerPool) -> None:
    first, second = workers.run(2, attempt, Penalised)
    assert first == second
    assert first.startswith("The value of 'down.weight' was asked for"), first


class Shown(Task):
    """Has no example; what comes before the call must leave nothing behind."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = None
        self.norm = nn.BatchNorm2d(1).requires_grad_(False)
        self.steps = 0
        self.loaders = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.log("brightness", batch[0].mean())
        batch[0].mul_(0.5)
        return F.mse_loss(self.net(self.norm(batch[0])), batch[1])

    def train_dataloader(self) -> Any:
        self.loaders += 1
        images = make_images().dataset
        return DataLoader(images, batch_size=5, shuffle=True)

    def val_dataloader(self) -> Any:
        return make_images(8)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0])


def train_shown(devices: int, loader: str) -> tuple[dict[str, Tensor], list[int]]:
    module = make_module(Shown)
    asked = "auto" if devices == 1 else PipelineStrategy(layers="trace", num_microbatches=1)
    trainer = make_trainer(devices=devices, strategy=asked)
    if loader == "hook":
        trainer.fit(module)
    else:
        trainer.fit(module, (batch for batch in make_images()))
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return {**state_of(module), **buffers}, [module.steps, module.loaders]


def predict_shown(devices: int) -> list[Any]:
    module = make_module(Shown)
    asked = "auto" if devices == 1 else PipelineStrategy(layers="trace", num_microbatches=1)
    trainer = make_trainer(devices=devices, strategy=asked)
    return trainer.predict(module, make_images())


def run_shown() -> tuple[Any, Any, Any, list[str]]:
    return (
        train_shown(2, "hook"),
        train_shown(2, "stream"),
        predict_shown(2),
        [attempt_shown(class_) for class_ in (Early, NeverCalled)],
    )


class Early(Shown):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.rate * self.net(batch[0]).sum()


class NeverCalled(Shown):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.norm(batch[0]).sum()


def attempt_shown(class_: type[Task]) -> str:
    try:
        trainer = make_trainer(devices=2, strategy=PipelineStrategy(layers="trace"))
        trainer.fit(make_module(class_))
    except ValueError as error:
        return str(error).splitlines()[0]
    return ""


@pytest.fixture(scope="module")
def shown(workers: WorkerPool) -> list[Any]:
    return workers.run(2, run_shown, timeout=120.0)


@pytest.mark.parametrize("loader", ["hook", "stream"])
def test_the_first_step_shows_what_is_traced(shown: list[Any], loader: str) -> None:
    expected, counts = train_shown(1, loader)
    ranks = [rank[0 if loader == "hook" else 1] for rank in shown]
    assert_equal([state for state, _ in ranks], expected)
    for _, found in ranks:
        assert found[0] == counts[0]
        assert found[1] == counts[1]


def test_a_prediction_shows_it_too(shown: list[Any]) -> None:
    expected = predict_shown(1)
    for rank in shown:
        assert all(
            float((a - b).abs().max()) < TOLERANCE for a, b in zip(rank[2], expected, strict=True)
        )


def test_a_first_step_that_shows_nothing_is_refused_alike(shown: list[Any]) -> None:
    assert shown[0][3] == shown[1][3]
    early, never = shown[0][3]
    assert "no attribute 'rate'" in early
    assert "Set `self.example_input_array`" in early
    assert never.startswith("`training_step` did not call 'net'")
