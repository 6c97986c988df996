"""The recipe's GPT under TensorParallelStrategy equals a single device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_dist import MeshStrategy, TensorParallelStrategy
from lightning_dist.shards import whole
from lightning_dist.strategies.shard_config import ShardConfig
from lightning_dist.tensor.config import TensorConfig
from recipes.gpt import GPT
from tests.helpers.models import make_trainer
from tests.helpers.workers import WorkerPool

DEPTH = 2
PLAN = {
    "model.0.token": "vocab",
    "model.*.attention.qkv": "colwise",
    "model.*.attention.out": "rowwise",
    "model.*.up": "colwise",
    "model.*.down": "rowwise",
    f"model.{DEPTH + 1}.logits": "colwise_gather",
}
TOLERANCE = 1e-10


class Measured(GPT):
    """Looks at its logits beside the loss, as users do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.accuracy = MulticlassAccuracy(256, average="micro")
        self.seen = SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.model(x)
        self.log("val_loss", F.cross_entropy(logits.transpose(1, 2), y), sync_dist=True)
        self.accuracy(logits.flatten(0, 1), y.flatten())
        self.seen(y.numel())
        self.log("val_accuracy", self.accuracy)
        self.log("val_seen", self.seen)
        self.log("val_mean_logit", logits.mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits: Tensor = self.model(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def data() -> TensorDataset:
    drawn = torch.randint(256, (2, 36, 8), generator=torch.Generator().manual_seed(1))
    return TensorDataset(drawn[0], drawn[1])


def strategy_of(
    tp_size: int, replicas: bool, **options: Any
) -> TensorParallelStrategy | MeshStrategy:
    if replicas:
        return TensorParallelStrategy(tp_size=tp_size, **{"plan": PLAN, **options})
    shard = ShardConfig(activation_checkpointing=options.pop("again", "none"))
    return MeshStrategy(tp=tp_size, shard=shard, tensor=TensorConfig(PLAN, **options))


def fit(devices: int, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Measured(width=32, depth=DEPTH, num_heads=4).double()
    strategy = strategy_of(**options) if devices > 1 else "auto"
    trainer = make_trainer(devices=devices, strategy=strategy, gradient_clip_val=0.5)
    replicas = trainer.strategy.distributed_sampler_kwargs if devices > 1 else {"num_replicas": 1}
    samples = data()
    sampler: Any = DistributedSampler(samples, shuffle=False, **{"rank": 0, **replicas})
    loader = DataLoader(samples, batch_size=4 // replicas["num_replicas"], sampler=sampler)
    gradients: list[dict[str, Tensor]] = []

    def keep_gradients(*_: Any) -> None:
        named = module.named_parameters()
        gradients.append({n: whole(p.grad).clone() for n, p in named if p.grad is not None})

    module.on_before_optimizer_step = keep_gradients
    trainer.fit(module, loader, loader)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    predicted = trainer.predict(module, loader)
    assert predicted is not None
    state = {name: whole(p.detach()).clone() for name, p in module.named_parameters()}
    return state, gradients, metrics, torch.cat(list(predicted)), replicas.get("rank", 0)


BOTH = {"sequence_parallel": True, "loss_parallel": True}
FOUND = {"plan": "auto"}
CASES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "2": (2, 2, True, {}),
    "4": (4, 4, True, {}),
    "2, sequence": (2, 2, True, {"sequence_parallel": True}),
    "2, plan found": (2, 2, True, FOUND),
    "2, loss": (2, 2, True, {"loss_parallel": True}),
    "2 replicas of 2, both": (4, 2, True, BOTH),
    "2 shards of 2": (4, 2, False, {}),
    "2 shards of 2, recomputed": (4, 2, False, {"again": "full", **BOTH}),
    "2 shards of 2, both": (4, 2, False, BOTH),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_a_single_device(
    workers: WorkerPool, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    devices, tp_size, replicas_only, flags = CASES[case]
    options = {"tp_size": tp_size, "replicas": replicas_only, **flags}
    state, gradients, metrics, predicted, _ = fit(1)
    assert metrics["val_seen"] == 36 * 8
    results = workers.run(devices, fit_in_pool, devices, options)
    replicas = 1 + max(place for *_, place in results)
    for found, steps, numbers, output, place in results:
        assert numbers.keys() == metrics.keys()
        for name in metrics:  # the training loss is each replica's own
            if replicas == 1 or name != "train_loss":
                assert numbers[name] == pytest.approx(metrics[name], abs=TOLERANCE), name
        assert float((output - predicted[place::replicas]).abs().max()) < TOLERANCE
        for name, value in state.items():
            assert float((found[name] - value).abs().max()) < TOLERANCE, name
        assert len(steps) == len(gradients) == 9
        for own, other in zip(steps, gradients, strict=True):
            for name, value in other.items():
                assert float((own[name] - value).abs().max()) < TOLERANCE, name


def fit_in_pool(devices: int, options: dict[str, Any]) -> Any:
    return fit(devices, **options)


def refusal(options: dict[str, Any]) -> str:
    module = Measured(width=32, depth=DEPTH, num_heads=4)

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
