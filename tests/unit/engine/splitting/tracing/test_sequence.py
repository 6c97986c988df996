"""A traced module computes what it computed before, layer by layer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.splitting.cut import cut, layers_of
from lightning_dist.engine.splitting.tracing.sequence import TracedLayers, traced_layers
from tests.helpers.networks.traced_models import ResNet, UNet


class Mixed(nn.Module):
    """What a graph can hold beside plain layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.memory = nn.LSTM(4, 4, batch_first=True)
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.2))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("twice", torch.zeros(4))
        self.rate = 0.5

    def forward(self, ids: Tensor, *more: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
        hidden, _ = self.memory(self.words(ids) * self.scale)
        for addend in more:
            hidden = hidden + addend
        with torch.no_grad():
            if self.training:
                self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
                self.twice.data.copy_(2 * self.mean.data)
        hidden = self.block(F.dropout(hidden - self.mean, self.rate, self.training))
        if mask is not None:
            hidden = hidden.masked_fill(mask[..., None], 0.0)
        noise = torch.rand(hidden.shape[0], 1, 1, device=hidden.device, dtype=hidden.dtype)
        return {"logits": [self.head(hidden + noise)], "used": "all", "none": None}


def mixed_input(batch_size: int, length: int = 5) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = torch.arange(batch_size * length).reshape(batch_size, length) % 10
    addend = torch.linspace(0, 1, batch_size * length * 4, dtype=torch.float64)
    return (ids, addend.reshape(batch_size, length, 4)), {"mask": ids > 7}


def image_input(batch_size: int, length: int = 8) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch_size)
    size = (batch_size, 1, length, length)
    return (torch.randn(size, generator=generator, dtype=torch.float64),), {}


def leaves(output: Any) -> Tensor:
    return output["logits"][0] if isinstance(output, dict) else output


Built = tuple[nn.Module, nn.Module, TracedLayers]
"""A traced module, what it was, and the layers."""


def build(class_: type[nn.Module], make_input: Any) -> Built:
    torch.manual_seed(0)
    module = class_().double()
    original = copy.deepcopy(module)
    args, kwargs = make_input(3)
    return module, original, TracedLayers(module, args, kwargs)


@pytest.fixture(scope="module")
def unet() -> Built:
    return build(UNet, image_input)


@pytest.fixture(scope="module")
def resnet() -> Built:
    return build(ResNet, image_input)


@pytest.fixture(scope="module")
def mixed() -> Built:
    return build(Mixed, mixed_input)


@pytest.mark.parametrize(
    ("built", "make_input", "lengths"),
    [
        ("unet", image_input, (8, 4)),
        ("resnet", image_input, (8, 5)),
        ("mixed", mixed_input, (5, 5)),
    ],
)
def test_computes_what_the_module_did(
    request: pytest.FixtureRequest, built: str, make_input: Any, lengths: tuple[int, ...]
) -> None:
    module, original, _ = request.getfixturevalue(built)
    for is_training in (True, False):
        module.train(is_training)
        original.train(is_training)
        for batch_size, length in ((3, lengths[0]), (1, lengths[0]), (4, lengths[1])):
            args, kwargs = make_input(batch_size, length)
            results = []
            for each in (module, original):
                torch.manual_seed(5)
                output = each(*args, **kwargs)
                loss = leaves(output).square().sum()
                gradients = torch.autograd.grad(loss, list(each.parameters()))
                results.append((leaves(output), gradients))
            torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-14)
    assert module.state_dict().keys() == original.state_dict().keys()
    torch.testing.assert_close(module.state_dict(), original.state_dict(), rtol=0, atol=1e-14)


def test_layers_begin_at_parameters_and_hand_on_what_is_alive(unet: Built) -> None:
    _, _, sequence = unet
    assert sequence.program.titles == ["down", "norm", "bottom", "up", "join", "head"]
    (x,), _ = image_input(2)
    values: Any = [x]
    for layer, alive in zip(sequence.module, [2, 3, 3, 2, 2], strict=False):
        values = layer(values)
        assert len(values) == alive
    assert sequence.module[5](values).shape == x.shape


def test_a_norm_counts_its_batches_in_its_own_layer(resnet: Built) -> None:
    _, _, sequence = resnet
    names = [sorted(names) for names in sequence.program.names]
    own = ["bias", "num_batches_tracked", "running_mean", "running_var", "weight"]
    assert names[2] == [f"blocks.0.norm.{name}" for name in own]
    assert names[1] == ["blocks.0.conv.weight"]


def test_each_mode_has_its_graph(mixed: Built) -> None:
    """Single parts in evaluation, a changed rate: whatever the forward reads of its parts."""
    module, original, _ = mixed
    for each in (module, original):
        each.train()
    args, kwargs = mixed_input(2)

    def outputs() -> list[Tensor]:
        found = []
        for each in (module, original):
            torch.manual_seed(1)
            found.append(leaves(each(*args, **kwargs)))
        return found

    before, _ = outputs()
    for each in (module, original):
        each.block.eval()
    frozen, expected = outputs()
    assert torch.equal(frozen, expected)
    for each in (module, original):
        each.rate = 0.9
    changed, expected = outputs()
    assert torch.equal(changed, expected)
    assert not torch.equal(before, frozen)
    assert not torch.equal(frozen, changed)


def test_versions_of_weights_stand_in_for_the_parameters(unet: Built) -> None:
    module, _, sequence = unet
    (x,), _ = image_input(2)
    aliases = {n: (p.detach() * 2).requires_grad_() for n, p in sequence.module.named_parameters()}
    values = sequence.program.begin((x,), {})
    output = torch.func.functional_call(sequence.module, aliases, (values,))
    gradients = torch.autograd.grad(output.sum(), list(aliases.values()))
    assert all(float(gradient.abs().sum()) > 0 for gradient in gradients)
    doubled = copy.deepcopy(UNet()).double()
    doubled.load_state_dict({n: 2 * p for n, p in module.state_dict().items()})
    torch.testing.assert_close(output, doubled(x), rtol=0, atol=1e-14)


def test_each_rank_keeps_its_layers_tensors() -> None:
    module, original, sequence = build(ResNet, image_input)
    cut(sequence, (4, 2), (1,))
    assert traced_layers(module) is sequence
    held = {"blocks.1.norm.weight", "blocks.1.norm.bias", "head.weight", "head.bias"}
    assert {name for name, _ in module.named_parameters()} == held
    assert sequence.away.names | module.state_dict().keys() == original.state_dict().keys()
    with sequence.away.as_empty(None):
        expected = [(n, p.shape, p.requires_grad) for n, p in original.named_parameters()]
        assert [(n, p.shape, p.requires_grad) for n, p in module.named_parameters()] == expected
        assert list(module.state_dict()) == list(original.state_dict())
        assert module.stem.weight.is_meta
    sequence.away.describe(torch.device("cpu"))
    with sequence.away.as_remote():
        assert [(n, p.shape, p.requires_grad) for n, p in module.named_parameters()] == expected
        assert module.stem.weight.is_cpu
        with pytest.raises(ValueError, match=r"'stem\.weight' was asked for"):
            module.stem.weight.sum()
    assert {name for name, _ in module.named_parameters()} == held
    module.eval()
    assert not module.blocks[0].norm.training, "parts are there, whoever has their tensors"
    with pytest.raises(ValueError, match=r"'blocks\.0\.conv' has parameters on another rank"):
        module.blocks[0].conv(torch.zeros(1, 4, 8, 8))
    with pytest.raises(ValueError, match="lives on stage 0"):
        module(torch.zeros(2, 1, 8, 8, dtype=torch.float64))
    last = layers_of(sequence, (4, 2), 1)
    assert {id(p) for p in last.parameters()} == {id(p) for p in module.parameters()}


def test_a_whole_state_can_be_loaded_and_names_are_checked() -> None:
    module, original, sequence = build(ResNet, image_input)
    cut(sequence, (4, 2), (1,))
    state = {name: value + 1 for name, value in original.state_dict().items()}
    module.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    with pytest.raises(RuntimeError, match="Unexpected key.*stem.other"):
        module.load_state_dict({**state, "stem.other": torch.ones(2)})
    back = {"stem.weight": torch.zeros_like(original.stem.weight)}
    sequence.away.restore({n: nn.Parameter(value) for n, value in back.items()})
    module.load_state_dict(state)
    assert torch.equal(module.stem.weight, state["stem.weight"])


class FrozenNorms(nn.Module):
    """Keeps its norms in evaluation mode, as is usual for detectors and in finetuning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)
        self.norm, self.last_norm = nn.BatchNorm2d(2), nn.BatchNorm2d(2)
        self.train()

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.first(x)))
        output: Tensor = self.last_norm(self.second(hidden)).mean()
        return output

    def train(self, mode: bool = True) -> FrozenNorms:
        super().train(mode)
        for norm in (self.norm, self.last_norm):
            norm.eval()
        return self


def test_norms_that_were_frozen_may_thaw() -> None:
    module, original, sequence = build(FrozenNorms, image_input)
    (x,), _ = image_input(2)
    for each in (module, original):
        nn.Module.train(each)
    assert torch.equal(module(x), original(x))
    assert int(module.norm.num_batches_tracked) == 1
    assert all(torch.equal(b, original.get_buffer(n)) for n, b in module.named_buffers())
    for layer, name in ((1, "norm"), (3, "last_norm")):
        of_the_norm = {f"{name}.{key}" for key in nn.BatchNorm2d(2).state_dict()}
        assert sequence.names_in([layer]) == of_the_norm


def test_a_buffer_that_many_layers_read_is_kept_by_each() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.unused = nn.Linear(2, 2)
            self.register_buffer("shift", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + self.shift) * self.shift

    sequence = TracedLayers(Shifted(), (torch.zeros(2, 2),), {})
    first = sequence.names_in([0])
    assert first == {"first.weight", "first.bias", "shift"}
    assert sequence.names_in([1]) == {*(n.replace("first", "second") for n in first)} | {
        "unused.weight",
        "unused.bias",
    }


@torch.library.custom_op("lightning_dist_tests::reverse_gradient", mutates_args=())
def reverse_gradient(x: Tensor) -> Tensor:
    return x.clone()


reverse_gradient.register_fake(torch.empty_like)
reverse_gradient.register_autograd(lambda _, gradient: -gradient)


class Advised(nn.Module):
    """Does what errors advise, for a backward of its own and for a branch on values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = reverse_gradient(self.first(x))
        hidden = torch.cond(hidden.sum() > 0, lambda h: h * 2, lambda h: h - 1, (hidden,))
        result: Tensor = self.second(hidden)
        return result


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # what `torch.cond` asks for
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_operators_with_gradients_of_their_own_are_traced(sign: float) -> None:
    torch.manual_seed(0)
    module = Advised().double()
    original = copy.deepcopy(module)
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(4, 3)
    TracedLayers(module, (x,), {})
    results = []
    for each in (module, original):
        output = each(sign * x)
        gradients = torch.autograd.grad(output.square().sum(), list(each.parameters()))
        results.append((output, gradients))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-14)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(x) * self.scale)
        return result


def test_layers_run_again_by_their_own_call_s_graph() -> None:
    module = Scaled()
    original = copy.deepcopy(module)
    x = torch.linspace(-1, 2, 12).reshape(4, 3)
    layers = TracedLayers(module, (x,), {})
    given = []
    for scale in (1.0, 2.0, *(3.0 + number for number in range(9))):  # more than are kept
        module.scale = scale
        leaves = layers.program.begin((x,), {})
        given.append((scale, layers.layer_input(True, None, (leaves,), {})))
    for original.scale, value in given:
        torch.testing.assert_close(layers.run(layers.module, value), original(x))
