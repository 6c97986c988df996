"""Which module is traced, with what example, and what of it a rank keeps."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.tracing.example import Arguments, CallExample
from lightning_dist.engine.splitting.tracing.split import TracedSplit, find_traced_split
from tests.helpers.networks.traced_models import Pair


class Small(L.LightningModule):
    """Three layers in one attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(2).requires_grad_(False)
        self.net = nn.ModuleDict({"deep": Deep()})["deep"]
        self.example_input_array: Any = torch.zeros(1, 2)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.three(self.two(self.one(x))) * scale


class WithForward(Small):
    """Its own forward makes another input for the traced module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.frozen(x)[:, None], scale=3.0)


def find(
    module: L.LightningModule, rank: int = 0, num_ranks: int = 2, **config: Any
) -> TracedSplit:
    def observe(traced: nn.Module, path: str) -> Arguments:
        raise AssertionError("there is an example")

    inputs = module.example_input_array
    example = CallExample(inputs, lambda: is_overridden("forward", module), observe)
    asked = PipelineConfig(**{"layers": "trace", **config})
    return find_traced_split(module, asked, num_ranks, rank, None, example)


def test_a_rank_keeps_its_layers_and_what_is_in_none() -> None:
    module = Small()
    split = find(module, rank=1, partition=[2, 1])
    own = {"net.three.weight", "net.three.bias"}
    outside = {name for name in module.state_dict() if name.startswith("frozen.")}
    whole = set(module.state_dict())
    assert [t.shape for t in split.tensors_outside(module)] == [
        t.shape for n, t in module.state_dict().items() if n in outside
    ]
    split.cut()
    assert set(module.state_dict()) == own | outside
    assert split.remote_names() == whole - own - outside
    assert all(split.is_stored_here(name) for name in own | outside)
    first = find(Small(), partition=[2, 1])
    first.cut()
    assert {name for name in whole if first.is_stored_here(name)} == whole - own - outside
    with split.whole():
        assert set(module.state_dict()) == whole
    assert set(module.state_dict()) == own | outside


def test_a_second_run_takes_the_first_ones_trace() -> None:
    module = Small()
    split = find(module, rank=1)
    split.cut()
    again = find(module, rank=1)
    again.cut()
    assert again.sequence is split.sequence
    assert (again.path, again.layers_per_stage) == (split.path, split.layers_per_stage)
    other = find(module, rank=0)
    with pytest.raises(ValueError, match="cut before"):
        other.cut()


def test_the_example_goes_through_the_forward_of_the_lightning_module() -> None:
    module = WithForward()
    find(module)
    assert module.net(torch.zeros(4, 1, 2), scale=3.0).shape == (4, 1, 2)
    with pytest.raises(ValueError, match=r"scale=1\.0"):
        module.net(torch.zeros(4, 1, 2))
    assert int(module.frozen.num_batches_tracked) == 0


def test_the_example_gets_the_parameters_dtype_and_may_be_a_tuple_or_a_dict() -> None:
    for example in ((torch.zeros(2, 2),), {"x": torch.zeros(2, 2), "scale": 1.0}):
        module = Small().to(torch.bfloat16)
        module.example_input_array = example
        find(module)
        assert module.net(torch.zeros(3, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_the_lightning_module_itself() -> None:
    split = find(Pair())
    assert split.path == ""
    assert split.layers.program.titles == ["left", "right", "rate", "out"]
    assert split.is_stored_here("left.weight")


class Outside(Small):
    def __init__(self, width: int = 17) -> None:
        super().__init__()
        self.scale = nn.Linear(width, 1)  # as many parameters as `net` has, unless given


class NotCalled(Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x)


class Tied(Small):
    def __init__(self) -> None:
        super().__init__()
        self.net.three.weight = self.net.one.weight


@pytest.mark.parametrize(("width", "layers"), [(1, "trace"), (17, "trace:net")])
def test_what_steps_use_behind_a_trace_is_the_last_stages(width: int, layers: str) -> None:
    module = Outside(width)
    split = find(module, rank=0, layers=layers)
    assert split.path == "net"
    assert split.layers.loss_parameters.names == {"scale.weight", "scale.bias"}
    assert split.stage_of("scale.weight") == 1
    whole = set(module.state_dict())
    split.cut()
    assert whole - set(module.state_dict()) == split.remote_names()
    assert split.remote_names() >= {"scale.weight", "scale.bias"}
    with split.whole():
        assert set(module.state_dict()) == whole
    again = find(module, rank=0, layers=layers)
    assert again.layers.loss_parameters is split.layers.loss_parameters


@pytest.mark.parametrize(
    ("class_", "options", "message"),
    [
        (Outside, {}, r"in \['net', 'scale'\], so no one module"),
        (Small, {"layers": "trace:body"}, r"trace:body.*no submodule.*\['frozen', 'net'\]"),
        (NotCalled, {}, "did not call 'net'"),
        (
            Tied,
            {},
            r"too few layers in 'net' for 2 stages \(one\).*'one.weight' is used more than once",
        ),
        (Small, {"partition": [3, 4]}, r"3 layers.*sum to 7.*begin at \['one', 'two', 'three'\]"),
    ],
)
def test_is_refused(class_: type[L.LightningModule], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find(class_(), **options)
