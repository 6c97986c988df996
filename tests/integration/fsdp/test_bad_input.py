"""Bad input is a ValueError on each rank, before anything hangs."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from lightning_dist import FSDPStrategy
from lightning_dist.wrap import AnyOf, ByClass, ByName, EachBlock
from tests.helpers.networks.models import (
    Classifier,
    make_layers,
    make_loader,
    make_module,
    make_trainer,
    state_of,
)
from tests.helpers.processes.workers import WorkerPool


class Idle(Classifier):
    """Has a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


class TwoDtypes(Classifier):
    """Has a layer in fp32; all others are in fp64."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.LayerNorm(6)

    def double(self) -> TwoDtypes:
        super().double()
        self.single.float()
        return self

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((self.single(x.float()).double(), y), batch_idx)


class Quasi(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class Averaging(Classifier):
    def configure_callbacks(self) -> Any:
        return [EMAWeightAveraging()]


class Swa(Classifier):
    def configure_callbacks(self) -> Any:
        return [StochasticWeightAveraging(0.1)]


class Prunes(Classifier):
    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured")]


class StateOfItsOwn(Classifier):
    """Makes its optimizer before its parameters are sharded, and its optimizer a state of them."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.Adagrad(self.parameters(), 0.1)

    def configure_optimizers(self) -> Any:
        return self.early


class Uneven(Classifier):
    """Has another layer on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2 + int(os.environ["RANK"]))


class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.model[-1] = nn.LazyLinear(3)


class ShardsItself(Classifier):
    def configure_model(self) -> None:
        fully_shard(self.model[0], mesh=self.trainer.strategy.device_mesh)


class Experts(Classifier):
    """Has an expert for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return super().training_step((self.experts[int(os.environ["RANK"])](x), y), batch_idx)


class Skips(Classifier):
    """Leaves its last layers out on one rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        layers = self.model[:2] if os.environ["RANK"] == "1" else self.model
        result: Tensor = layers(batch[0]).sum()
        return result


BY_NAME = {"wrap": ByName(["experts.*", "model.*"])}


class BuiltLate(Classifier):
    """Builds its layers without memory, and has no values before they are sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential()

    def configure_model(self) -> None:
        if not len(self.model):
            self.model = make_layers().double()


class BuiltLateSwa(BuiltLate):
    configure_callbacks = Swa.configure_callbacks


class BuiltInPart(BuiltLate):
    def configure_model(self) -> None:
        super().configure_model()
        raise ValueError("the user's own mistake")


class LayerByLayer(Classifier):
    """Runs what is in its blocks, and never the blocks."""

    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3))
        self.model = nn.ModuleList(blocks)  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1)
        for block in self.model:
            for layer in block:  # type: ignore[attr-defined]
                x = layer(x)
        return x.square().mean()


class WritesBehind(Classifier):
    """Writes into what a linear layer returns for a sequence, a view."""

    def __init__(self) -> None:
        super().__init__()
        first, second, last = (nn.Linear(6, 6) for _ in range(3))
        self.model = nn.Sequential(first, second, nn.ReLU(inplace=True), last)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with warnings.catch_warnings():  # torch's, that a view is returned
            warnings.simplefilter("ignore")
            return self.model(batch[0]).square().mean()


class Forces(Classifier):
    """Takes a gradient in the forward, of which it takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].flatten(1).requires_grad_()
        (forces,) = torch.autograd.grad(self.model(x).sum(), x, create_graph=True)
        return forces.square().mean()


def attempt(module: Any, options: dict[str, Any], size_per_rank: int) -> tuple[str, str, float]:
    start = time.monotonic()
    size = 32 + size_per_rank * int(os.environ["RANK"])
    try:
        trainer = make_trainer(devices=2, strategy=FSDPStrategy(**options))
        trainer.fit(make_module(module), make_loader(size), make_loader(8))
    except BaseException as error:
        return type(error).__name__, " ".join(str(error).split()), time.monotonic() - start
    return "nothing", "", time.monotonic() - start


@pytest.mark.parametrize(
    ("module", "options", "size_per_rank", "message"),
    [
        (Idle, {}, 0, r"does not depend on \['spare.weight', 'spare.bias'\].*find_unused"),
        (TwoDtypes, {}, 0, r"\(root\).*float64 \(.*float32 \(single.weight, single.bias\).*ByName"),
        (Quasi, {}, 0, "LBFGS.*DDPStrategy"),
        (Averaging, {}, 0, "EMAWeightAveraging copies the whole model"),
        (Swa, {}, 0, "StochasticWeightAveraging copies the whole model"),
        (Prunes, {}, 0, "ModelPruning compares all parameters.*DDPStrategy"),
        (StateOfItsOwn, {}, 0, "not a parameter of the module.*in `configure_optimizers`"),
        (Uneven, {}, 0, r"'extra.weight' is \(2, 2\).* on rank 0 and \(3, 2\).* on rank 1"),
        (Lazy, {}, 0, r"\['model.7.weight', 'model.7.bias'\] of lazy.*Call the model once in `set"),
        (Classifier, {}, 8, r"The ranks have \[4, 5\] training batches"),
        (Classifier, {"wrap": ByClass(["ConvLayr"])}, 0, "ConvLayr.*ConvLayer"),
        (Classifier, {"wrap": ByName(["modle.*"])}, 0, "modle"),
        (BuiltLate, {"wrap": ByName(["modle.*"])}, 0, "modle"),
        (BuiltLateSwa, {}, 0, "StochasticWeightAveraging copies the whole model"),
        (BuiltInPart, {}, 0, "the user's own mistake"),
        (ShardsItself, {"meta_init": False}, 0, "sharded already.*wrap='manual'"),
        (Classifier, {"wrap": "manual"}, 0, "manual.*configure_model.*fully_shard"),
        (
            Classifier,
            {"activation_checkpointing": True},
            0,
            "activation_checkpointing=True.*'full'",
        ),
        (Classifier, {"shard_size": 3}, 0, r"shard_size=3.*2 processes.*\[1, 2\]"),
        (Classifier, {"reshard_after_forward": 3}, 0, "reshard_after_forward=3.*2"),
        (Experts, BY_NAME, 0, "rank 0 at 'experts.0', rank 1 at 'experts.1'"),
        (Experts, {**BY_NAME, "find_unused_parameters": True}, 0, "different units.*DDPStrategy"),
        (LayerByLayer, {}, 0, "layers inside of a unit, and not the unit, let `wrap=` name"),
        (WritesBehind, {"wrap": ByClass(["Linear"])}, 0, "into the output of a unit.*inplace"),
        (Forces, {}, 0, "forces, and shards are gathered for one backward only: use DDPStrategy"),
        (Skips, {}, 0, "rank 0 at 'model.2', rank 1 at 'the end of the step'"),
    ],
)
def test_is_refused_on_each_rank(
    workers: WorkerPool, module: Any, options: dict[str, Any], size_per_rank: int, message: str
) -> None:
    for kind, text, seconds in workers.run(2, attempt, module, options, size_per_rank):
        assert kind == "ValueError", (kind, text)
        assert seconds < 10
        with pytest.raises(ValueError, match=message):
            raise ValueError(text)


def fit_two_dtypes(devices: int) -> dict[str, Tensor]:
    wrap = AnyOf([EachBlock(), ByName(["single"])])
    strategy: Any = FSDPStrategy(wrap) if devices > 1 else "auto"
    module = make_module(TwoDtypes)
    trainer = make_trainer(devices=devices, strategy=strategy, gradient_clip_val=0.1)
    trainer.fit(module, make_loader(32), make_loader(8))
    return state_of(module)


def test_what_the_advice_says_is_trained_as_on_one_device(
    workers: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    expected = fit_two_dtypes(1)
    for state in workers.run(2, fit_two_dtypes, 2):
        for name, value in expected.items():
            single = value.dtype == torch.float32
            assert torch.allclose(state[name], value, 0, 1e-6 if single else 1e-7), name


def test_unused_parameters_are_fine_when_told(workers: WorkerPool) -> None:
    answers = workers.run(2, attempt, Idle, {"find_unused_parameters": True}, 0)
    assert [kind for kind, *_ in answers] == ["nothing"] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"wrap": "auot"}, "auot.*auto"),
        ({"wrap": ["Block"]}, "wrap=.'Block'. is unknown"),
        ({"reshard_after_forward": "x"}, "reshard_after_forward='x' must be 'auto', True, False"),
        ({"offload": "disk"}, "offload='disk'.*cpu"),
        ({"reduce_dtype": "int8"}, "reduce_dtype='int8'"),
        ({"activation_checkpointing": "some"}, "activation_checkpointing='some'.*selective"),
        ({"activation_checkpointing": "selective", "compile": True}, "selective.*compile"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FSDPStrategy(**arguments)


def test_classes_are_named() -> None:
    with pytest.raises(ValueError, match="must be names, such as 'torch.nn.Linear'"):
        ByClass([nn.Linear])  # type: ignore[list-item]


class Shadowed(Classifier):
    """Follows its weights with whole tensors."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.detach() - torch.zeros(parameter.shape, dtype=parameter.dtype)


class Averaged(Classifier):
    """Copies its sharded model, to average the weights there."""

    def on_fit_start(self) -> None:
        AveragedModel(self.model)


def follow(module: type[Classifier], error: type[Exception], message: str) -> str:
    strategy = FSDPStrategy(timeout_s=20.0)
    trainer = make_trainer(devices=2, strategy=strategy)
    with pytest.raises(error, match=message) as caught:
        trainer.fit(make_module(module), make_loader(8), make_loader(8))
    return "\n".join(getattr(caught.value, "__notes__", []))


def test_a_hook_that_mixes_shards_and_tensors_has_advice(workers: WorkerPool) -> None:
    mixed = r"mixed torch\.Tensor and DTensor"
    for notes in workers.run(2, follow, Shadowed, RuntimeError, mixed):
        assert "parameter.full_tensor()" in notes


def test_a_hook_that_copies_a_unit_has_advice(workers: WorkerPool) -> None:
    copied = "does not support deepcopy"
    for notes in workers.run(2, follow, Averaged, AssertionError, copied):
        assert "use ShardedWeightAveraging" in notes


@pytest.mark.parametrize("size", ["x", 1.5, 0])
def test_a_size_that_is_none(size: Any) -> None:
    with pytest.raises(ValueError, match=f"shard_size={size!r} must be 'auto' or an integer"):
        FSDPStrategy(shard_size=size).mesh_shape(4)


def test_nothing_is_described_before_a_run() -> None:
    with pytest.raises(ValueError, match="no run has been set up yet"):
        FSDPStrategy().describe()
