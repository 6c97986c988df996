"""What a mesh cannot do is refused on each rank alike, with the numbers and the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshStrategy
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.wrap import ByName
from recipes.gpt import GPT
from tests.helpers.gpt_parity import data, make_gpt
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool


def tied() -> GPT:
    module = make_gpt()
    module.model[-1].logits.weight = module.model[0].token.weight  # type: ignore[union-attr]
    return module


def odd_vocabulary() -> GPT:
    module = make_gpt()
    module.model[0].token = nn.Embedding(255, 32)
    return module


class TwoOptimizers(GPT):
    """Gives its weights and its biases to an optimizer each."""

    def configure_optimizers(self) -> Any:
        halves: tuple[list[Any], list[Any]] = ([], [])
        for parameter in self.parameters():
            halves[parameter.dim() > 1].append(parameter)
        return [torch.optim.SGD(half, lr=0.1) for half in halves], []


class Penalised(GPT):
    """Computes with parameters in its step."""

    def __init__(self, part: str) -> None:
        super().__init__(width=32, depth=2, num_heads=4)
        self.part = part

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + sum(p.square().sum() for p in self.get_submodule(self.part).parameters())


def steps_itself() -> GPT:
    module = make_gpt()
    module.automatic_optimization = False
    return module


def refusal(
    make_module: Any, strategy: dict[str, Any], trainer: dict[str, Any], length: int
) -> str:
    module = make_module()
    samples = TensorDataset(*(tensor[:, :length] for tensor in data().tensors))

    def run() -> None:
        made = make_trainer(devices=4, strategy=MeshStrategy(**strategy), **trainer)
        loader = DataLoader(samples, batch_size=4)
        made.fit(module, loader, loader)

    with pytest.raises(ValueError, match=r".") as caught:
        run()
    return str(caught.value)


CUT_IN_TWO_WAYS = {"model.0.token": "vocab", "model.2.up": "colwise", "model.3.logits": "rowwise"}

CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int, list[str]]] = {
    "sizes": (make_gpt, {"pp": 3}, {}, 8, ["pp=3", "world size of 4", "pp=2 x dp_shard=2"]),
    "pipedream": (
        make_gpt,
        {"pp": 2, "pipeline": PipelineConfig(schedule="pipedream")},
        {},
        8,
        ["'pipedream'", "older versions", "PipelineStrategy(schedule='pipedream')"],
    ),
    "manual": (
        make_gpt,
        {"pp": 2, "shard": ShardConfig(wrap="manual")},
        {},
        8,
        ["wrap='manual'", "pp=2"],
    ),
    "manual, sharded": (
        make_gpt,
        {"tp": 2, "shard": ShardConfig(wrap="manual")},
        {},
        8,
        ["wrap='manual'", "tp=2"],
    ),
    "manual optimization": (
        steps_itself,
        {"tp": 2},
        {},
        8,
        ["Manual optimization", "share layers", "FSDPStrategy"],
    ),
    "nothing to offload": (
        make_gpt,
        {"pp": 2, "tp": 2, "shard": ShardConfig(offload="cpu")},
        {},
        8,
        ["offload='cpu'", "dp_shard=1", "nothing is sharded", "dp_shard=2"],
    ),
    "a unit on several stages": (
        make_gpt,
        {"pp": 2, "shard": ShardConfig(wrap=ByName(["model"]))},
        {},
        8,
        ["['model']", "several stages"],
    ),
    "more stages than layers": (
        lambda: GPT(width=32, depth=1, num_heads=4),
        {"pp": 4, "dp_shard": 1},
        {},
        8,
        ["4", "3 layers"],
    ),
    "tied over stages that cut it in different ways": (
        tied,
        {"pp": 2, "tp": 2, "tensor": TensorConfig(plan=CUT_IN_TWO_WAYS)},
        {},
        8,
        ["'0.token.weight' (stage 0)", "'3.logits.weight' (stage 1)", "cuts one", "colwise_gather"],
    ),
    "tied over stages of one rank that are sharded": (
        tied,
        {"pp": 2, "pipeline": PipelineConfig(schedule="zbv")},
        {},
        8,
        ["'0.token.weight' (stage 0)", "'3.logits.weight' (stage 3)", "one rank", "'1f1b'"],
    ),
    "several optimizers": (
        lambda: TwoOptimizers(width=32, depth=2, num_heads=4),
        {"pp": 2},
        {},
        8,
        ["`configure_optimizers`", "several optimizers", "one per rank", "parameter groups"],
    ),
    "a plan": (
        make_gpt,
        {"pp": 2, "tp": 2, "tensor": TensorConfig(plan={"model.*.attention.qvk": "colwise"})},
        {},
        8,
        ["'model.*.attention.qvk'", "Did you mean"],
    ),
    "a vocabulary": (
        odd_vocabulary,
        {"pp": 2, "tp": 2, "tensor": TensorConfig(plan=CUT_IN_TWO_WAYS)},
        {},
        8,
        ["255 rows", "'model.0.token'", "256"],
    ),
    "logits that nobody spreads": (
        odd_vocabulary,
        {"tp": 2, "tensor": TensorConfig(loss_parallel=True)},
        {},
        8,
        ["loss_parallel=True", "no head", "pad 255 to 256"],
    ),
    "a penalty on weights": (
        lambda: Penalised("model.1.up"),
        {"tp": 2},
        {},
        8,
        ["each rank has a part only", "weight_decay"],
    ),
    "a penalty on weights of the last stage": (
        lambda: Penalised("model.3"),
        {"pp": 2, "tp": 2},
        {},
        8,
        ["each rank has a part only", "weight_decay"],
    ),
    "a penalty on weights of all stages": (
        lambda: Penalised("model"),
        {"pp": 2, "tp": 2},
        {},
        8,
        ["'token.weight' of layer '0'", "lives on stage 0"],
    ),
    "a sequence": (
        make_gpt,
        {"pp": 2, "tp": 2, "tensor": TensorConfig(sequence_parallel=True)},
        {},
        7,
        ["sequence of 7", "tp_size=2", "Pad it to 8"],
    ),
}


@pytest.mark.some(
    "a penalty on weights of all stages",
    "a sequence",
    "logits that nobody spreads",
    "manual*",
    "more stages than layers",
    "pipedream",
    "several optimizers",
    "sizes",
    "tied over stages of one rank that are sharded",
)
@pytest.mark.parametrize("name", CASES)
def test_is_refused_alike(workers: WorkerPool, name: str) -> None:
    *_, words = CASES[name]
    first, *others = workers.run(4, refusal_of, name)
    said = first.splitlines()[0]
    assert all(said in other for other in others)
    for word in words:
        assert word in first


def refusal_of(name: str) -> str:
    *arguments, _ = CASES[name]
    return refusal(*arguments)


def test_layers_of_a_mesh_stay_where_they_are() -> None:
    with pytest.raises(ValueError, match="partition='profile' moves layers when it has measured"):
        MeshStrategy(pp=2, pipeline=PipelineConfig(partition="profile"))


@pytest.mark.parametrize(
    "sizes", [{"tp": "auto"}, {"pp": "2"}, {"dp_replicate": "auto"}, {"dp_shard": None}, {"tp": 0}]
)
def test_sizes_are_counts(sizes: dict[str, Any]) -> None:
    (name,) = sizes
    with pytest.raises(ValueError, match=f"{name}=.*an integer of at least 1"):
        MeshStrategy(**sizes)


@pytest.mark.parametrize("plan", [[], None, {}, {1: "colwise"}, True])
def test_a_plan_is_a_dictionary(plan: Any) -> None:
    with pytest.raises(ValueError, match="must be 'auto' or a dictionary"):
        TensorConfig(plan=plan)


def test_a_dry_run_has_a_world() -> None:
    with pytest.raises(ValueError, match="world_size='4' must be an integer"):
        MeshStrategy(tp=2).dry_run(make_gpt(), "4", sample_batch=None)  # type: ignore[arg-type]
