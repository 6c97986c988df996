"""Half precision follows a plain loop bit for bit, under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins.precision import MixedPrecision as AutomaticMixedPrecision
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.splitting.config import PipelineConfig
from tests.helpers.half_reference import half_weights, keep_norms, make_half, one_thread
from tests.helpers.networks.models import (
    ConvLayer,
    make_loader,
    make_module,
    make_optimizer,
    make_trainer,
)
from tests.helpers.oracle import train_sequentially
from tests.helpers.processes.workers import WorkerPool
from tests.integration.callbacks.half_common import (
    Asked,
    Halved,
    Run,
    assert_equal,
    assert_follows,
    batches_of,
    expected,
    fit,
    joined,
    largest_difference,
)
from tests.integration.conformance.strategies import PLAN

BF16 = torch.bfloat16
MAKE: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    "lightning": LightningDDPStrategy,
    "fsdp": FSDPStrategy,
    "gpipe": lambda: PipelineStrategy(schedule="gpipe", num_microbatches=8),
    "1f1b": lambda: PipelineStrategy(num_microbatches=8),
    "pipedream": lambda: PipelineStrategy(schedule="pipedream", partition="uniform"),
    "mesh": lambda: MeshStrategy(pp=2, pipeline=PipelineConfig(num_microbatches=8)),
    "mesh, in parts": lambda: MeshStrategy(pp=2, pipeline=PipelineConfig("zb_h1", 8)),
    "traced": lambda: PipelineStrategy("auto", "gpipe", 8, layers="trace"),
    "traced, in parts": lambda: PipelineStrategy("auto", "zb_h1", 8, layers="trace"),
    "tp": lambda: TensorParallelStrategy(plan=PLAN),
}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a Trainer of this process be a single device's."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def run(name: str, *asked: Asked) -> list[Run]:
    return [fit(MAKE[name](), 2, each) for each in asked]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_single_device(optimizer: str) -> None:
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    one = fit("auto", 1, Asked(optimizer=optimizer))
    assert_follows([one], expected(optimizer=optimizer))
    one = fit("auto", 1, Asked(optimizer=optimizer, trainer=trainer))
    assert_equal(one.state, expected(optimizer=optimizer, accumulate=2, clip=0.1).state)


class Recomputed(ConvLayer):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Forgetful(Halved):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for layer in self.model[:6]:
            layer.__class__ = Recomputed


@pytest.mark.usefixtures("alone")
def test_what_is_computed_again_is_half_again() -> None:
    assert_equal(fit("auto", 1, Asked(), Forgetful).state, expected().state)


@pytest.mark.some("gpipe-1-8")
@pytest.mark.parametrize(
    ("name", "shares", "num_microbatches"),
    [
        ("ddp", 2, 1),
        ("lightning", 2, 1),
        ("gpipe", 1, 8),
        ("mesh", 1, 8),
        ("mesh, in parts", 1, 8),
        ("traced", 1, 8),
        ("traced, in parts", 1, 8),
    ],
)
def test_two_ranks(workers: WorkerPool, name: str, shares: int, num_microbatches: int) -> None:
    ranks = workers.run(2, run, name, Asked(shares=shares))
    found = expected(shares=shares, num_microbatches=num_microbatches)
    assert_follows([run for (run,) in ranks], found)


@pytest.mark.some("fsdp-*")
@pytest.mark.parametrize(("name", "shares", "num_microbatches"), [("fsdp", 2, 1), ("1f1b", 1, 8)])
def test_accumulated_and_clipped(
    workers: WorkerPool, name: str, shares: int, num_microbatches: int
) -> None:
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    ranks = workers.run(2, run, name, Asked(shares=shares), Asked({}, trainer, shares))
    plain, clipped = zip(*ranks, strict=True)
    options = {"shares": shares, "num_microbatches": num_microbatches}
    assert_follows(plain, expected(**options))
    # The norm over several ranks is a sum in another order.
    found = expected(**options, accumulate=2, clip=0.1)
    assert largest_difference(joined(clipped), found.state) < 1e-6


@pytest.mark.long
def test_spread_layers_follow_closely(workers: WorkerPool) -> None:
    # Where pieces of a sum are rounded by themselves nothing is bit for bit.
    scaled = Asked({"compute": "fp16", "initial_scale": 2.0**19})
    ranks = workers.run(2, run, "tp", Asked(), scaled)
    for first, second in zip(*ranks, strict=True):
        assert_equal(first.state, second.state)
        assert first.history == second.history
    assert 0 < largest_difference(ranks[0][0].state, expected().state) < 2e-3
    assert 1 <= ranks[0][1].history[-1][1] < 6


LAYERS = [f"model.{i}.{name}" for i in range(6) for name in ("conv", "linear")] + ["model.7"]


def layers_in(run: Run) -> set[str]:
    """Those that the metrics speak of."""
    prefix = "mixed_precision/underflow_share/"
    return {name.removeprefix(prefix) for name in run.metrics if name.startswith(prefix)}


def oracle(epochs: int = 2, *, master_weights: bool = True) -> dict[str, Tensor]:
    model = make_module(Halved).float().model
    if not master_weights:
        make_half(model, BF16)
    stages = [model[:4], model[4:]]
    keep_norms(model)
    optimizers = [make_optimizer("sgd", stage.parameters()) for stage in stages]
    batches = [(x.to(BF16), y) for ((x, y),) in batches_of(1, epochs)]

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), y)

    def copy(stage: Any) -> dict[str, Tensor]:
        return half_weights(stage, BF16)

    with one_thread():
        train_sequentially(stages, optimizers, batches, loss, (0, 6), "stash", copy=copy)
    return {f"model.{n}": p.detach() for n, p in model.named_parameters()}


TAKEN_APART: dict[str, dict[str, Any]] = {
    "layers": {"partition": "uniform"},
    "graph": {"partition": [12, 7], "layers": "trace"},
}


def fit_pipedream(options: dict[str, Any]) -> tuple[Run, tuple[int, ...]]:
    strategy = PipelineStrategy(schedule="pipedream", **options)
    asked = Asked({"log_layers_every_n_steps": 3}, {"max_epochs": 2})
    return fit(strategy, 2, asked), strategy.peak_stash_bytes


@pytest.mark.some("layers")
@pytest.mark.parametrize("options", TAKEN_APART.values(), ids=TAKEN_APART)
def test_stashed_versions_are_the_copies(workers: WorkerPool, options: dict[str, Any]) -> None:
    ranks = workers.run(2, fit_pipedream, options)
    assert_equal(joined([run for run, _ in ranks]), oracle())
    held = ranks[0][0].state.items()
    num_bytes = sum(value.numel() * (4 if "norm" in name else 2) for name, value in held)
    assert [stash for _, stash in ranks] == 2 * [(num_bytes, 0)]
    assert layers_in(ranks[0][0]) == layers_in(ranks[1][0]) == set(LAYERS)


@pytest.mark.usefixtures("alone")
def test_parameters_may_be_half_themselves() -> None:
    one = fit("auto", 1, Asked({"master_weights": False}))
    assert_follows([one], expected(master_weights=False))
    assert {value.dtype for value in one.state.values()} == {BF16, torch.float32}


HALF_THEMSELVES: dict[str, dict[str, int]] = {
    "1f1b": {"num_microbatches": 8},
    "gpipe": {"num_microbatches": 8},
    "mesh": {"num_microbatches": 8},
    "traced": {"num_microbatches": 8},
    "ddp": {"shares": 2},
    "fsdp": {"shares": 2, "num_shards": 2},
}


def run_with_half_parameters() -> list[Run]:
    cases: dict[str, dict[str, int]] = {**HALF_THEMSELVES, "pipedream": {}}
    precision = {"master_weights": False}
    return [
        fit(MAKE[name](), 2, Asked(precision, shares=case.get("shares", 1)))
        for name, case in cases.items()
    ]


@pytest.mark.long
def test_half_parameters_on_two_ranks(workers: WorkerPool) -> None:
    *runs, asynchronous = zip(*workers.run(2, run_with_half_parameters), strict=True)
    for pair, case in zip(runs, HALF_THEMSELVES.values(), strict=True):
        assert_follows(list(pair), expected(**case, master_weights=False))
        assert {value.dtype for value in joined(list(pair)).values()} == {BF16, torch.float32}
    assert_equal(joined(list(asynchronous)), oracle(1, master_weights=False))


@pytest.mark.usefixtures("alone")
def test_the_report_names_layers() -> None:
    asked = {"compute": "fp16", "loss_scale": 1.0, "log_layers_every_n_steps": 4}
    one = fit("auto", 1, Asked(asked))
    assert layers_in(one) == set(LAYERS)
    shares = [one.metrics[f"mixed_precision/underflow_share/{layer}"] for layer in LAYERS]
    assert all(0.0 <= share < 0.5 for share in shares)
    assert any(shares)  # a scale of 1 loses some
    assert not any(one.metrics[f"mixed_precision/overflow_share/{layer}"] for layer in LAYERS)


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_is_an_ordinary_one(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    fit("auto", 1, Asked(save=path))
    saved = load_full(path)
    assert {value.dtype for value in saved["state_dict"].values()} == {torch.float32}
    trainer = make_trainer(devices=1, max_epochs=2)
    module = make_module(Halved).float()
    module.history = []
    module.model.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    loader = make_loader(48)
    trainer.fit(module, loader, loader, ckpt_path=path, weights_only=True)
    assert trainer.global_step == 12


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "bf16-mixed"}, "Both MixedPrecision and precision='bf16-mixed'"),
        ({"precision": "bf16-true"}, "Both MixedPrecision and precision='bf16-true'"),
        ({"precision": "64-true"}, "Both MixedPrecision and precision='64-true'"),
        (
            {"plugins": [AutomaticMixedPrecision("bf16-mixed", "cpu")]},
            "Both MixedPrecision and precision='bf16-mixed'",
        ),
        ({}, "'model.0.conv.weight' is torch.float64"),
    ],
)
def test_what_is_asked_for_twice(options: dict[str, Any], message: str) -> None:
    trainer = make_trainer(devices=1, callbacks=[MixedPrecision()], **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(make_module(Halved), make_loader(8), make_loader(8))


class Evaluated(Halved):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_computes_many_gradients_in_a_step() -> None:
    module = make_module(Evaluated).float()
    trainer = make_trainer(devices=1, callbacks=[MixedPrecision("fp16")])
    with pytest.raises(ValueError, match="LBFGS computes many in one step"):
        trainer.fit(module, make_loader(8), make_loader(8))


class Whole(Halved):
    """Is traced itself."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.temperature

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])


class Box(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(2 * x)


class Boxed(Halved):
    """What is traced is inside of what is called."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.model = Box(self.model)


TRACED: dict[str, type[Halved]] = {"trace": Whole, "trace:model.inner": Boxed}
KEPT = {"keep_fp32": ["norm", "loss", "0.conv"]}


def fit_traced(devices: int) -> list[Run]:
    return [
        fit(
            "auto" if devices == 1 else PipelineStrategy(layers=layers, num_microbatches=1),
            devices,
            Asked(precision),
            class_,
        )
        for layers, class_ in TRACED.items()
        for precision in ({}, KEPT)
    ]


@pytest.mark.long
def test_a_graph_casts_where_modules_would(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = workers.run(2, fit_traced, 2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for pair, one in zip(zip(*ranks, strict=True), fit_traced(1), strict=True):
        assert_follows(list(pair), one)


def trace_in_two_precisions() -> str:
    module = make_module(Halved).float()
    module.history = []
    ((module.example_input_array, _),) = make_loader(8)
    loader = make_loader(8)
    strategy, options = PipelineStrategy(layers="trace"), {"devices": 2}
    half = make_trainer(strategy=strategy, callbacks=[MixedPrecision()], **options)
    half.fit(module, loader, loader)
    other = make_trainer(strategy=PipelineStrategy(layers="trace"), **options)
    with pytest.raises(ValueError, match="in another precision") as caught:
        other.test(module, loader)
    return str(caught.value)


@pytest.mark.long
def test_a_graph_is_of_one_precision(workers: WorkerPool) -> None:
    for message in workers.run(2, trace_in_two_precisions):
        assert "'model' was traced for an earlier run" in message
