from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.engine.sharding.deferred_init.api import deferred_init, named_tensors
from recipes.gpt import GPT

SEED = 11


def assert_same(given: Tensor, expected: Tensor) -> None:
    assert given.device.type == "cpu"
    assert (given.dtype, given.shape) == (expected.dtype, expected.shape)
    assert given.stride() == expected.stride()
    both = [t.detach().resolve_conj().resolve_neg().flatten() for t in (given, expected)]
    assert torch.equal(*(tensor.view(torch.uint8) for tensor in both))  # for NaN is not NaN


def assert_equal_to_ordinary(
    build: Callable[[], nn.Module], made_at_once: Sequence[str] = ()
) -> None:
    """Compares values, in any order of making them, and the generator's state afterwards."""
    torch.manual_seed(SEED)
    ordinary = build()
    after, expected = torch.get_rng_state(), named_tensors(ordinary)
    torch.manual_seed(SEED)
    with deferred_init() as tape:
        module = build()
    assert torch.equal(torch.get_rng_state(), after)
    tensors = named_tensors(module)
    assert list(tensors) == list(expected)
    assert [name for name, tensor in tensors.items() if not tensor.is_meta] == list(made_at_once)
    for name in [*tensors, *reversed(tensors)]:
        assert_same(tape.materialize(tensors[name]), expected[name])
    assert torch.equal(torch.get_rng_state(), after)
    for name, parameter in ordinary.named_parameters():
        assert module.get_parameter(name).requires_grad == parameter.requires_grad


class Holder(nn.Module):
    """Holds what a function makes: one tensor, or several."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        made = make()
        for index, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
            self.register_buffer(f"b{index}", tensor)


def skipped() -> nn.Module:
    layer = nn.utils.skip_init(nn.Linear, 4, 3)  # draws nothing
    nn.init.normal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return nn.Sequential(layer, nn.Linear(3, 2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "bfloat16": lambda: nn.Linear(5, 3, dtype=torch.bfloat16),
    "conv": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "layer_norm": lambda: nn.LayerNorm(4),
    "embedding": lambda: nn.Embedding(7, 4, padding_idx=2),
    "attention": lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "gru": lambda: nn.GRU(3, 4),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2
    ),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "gpt": lambda: GPT(width=16, depth=2),
    "half": lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).half(),
    "skip_init": skipped,
}


@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_modules_are_those_of_ordinary_construction(build: Callable[[], nn.Module]) -> None:
    assert_equal_to_ordinary(build)


def test_buffers_of_batch_norm() -> None:
    assert_equal_to_ordinary(lambda: nn.BatchNorm2d(3), ["num_batches_tracked"])


INITS: dict[str, Callable[[Tensor], Any]] = {
    "trunc_normal_": nn.init.trunc_normal_,
    "trunc_normal_near": lambda w: nn.init.trunc_normal_(w, a=-0.8, b=0.9),
    "trunc_normal_far": lambda w: nn.init.trunc_normal_(w, a=2.0, b=3.0),
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda w: nn.init.sparse_(w, 0.3),
    "eye_": nn.init.eye_,
    "dirac_": lambda w: nn.init.dirac_(w.view(*w.shape, 1)),
    "constant_": lambda w: nn.init.constant_(w, 0.5),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
@pytest.mark.parametrize("size", [(20, 30), (30, 20)])
def test_initializers(init: Callable[[Tensor], Any], size: tuple[int, int]) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(*size), nn.Linear(2, 2))
        init(model[0].weight)
        return model

    assert_equal_to_ordinary(build)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02 / module.in_features**0.5)
        nn.init.zeros_(module.bias)


def applied() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).apply(init_weights)


def changed_in_place() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(3, 4))
    first, second, table = model
    first.weight.data.mul_(0.5)
    with torch.no_grad():
        first.weight[0].fill_(3.0)
        first.weight[1, 1:3] = torch.arange(2.0)
        first.weight[2] = 7.0
        second.weight.copy_(first.weight.t())
        second.weight[second.weight > 0.2] *= -1.0
        table.weight[1] = second.bias
        first.bias.data = second.bias.data * 2
    first.bias.requires_grad_(False)
    return model


def copied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.ModuleList([layer, *(copy.deepcopy(layer) for _ in range(2)), nn.Linear(3, 1)])


def loaded() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    state = {k: np.arange(6, dtype=np.float32)[: v.numel()] for k, v in model.state_dict().items()}
    state = {k: torch.from_numpy(v).view(model.state_dict()[k].shape) for k, v in state.items()}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict(state)
    for tensor in state.values():
        tensor.zero_()  # the tape has its own copy
    return model


def drop_path() -> nn.Module:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    rates += [r.item() for r in torch.linspace(0, 0.3, 4, device="cpu")]
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(int(10 * rates[3]), 2))


BUILDS = {f.__name__: f for f in (applied, changed_in_place, copied, drop_path)}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
def test_what_constructors_do(build: Callable[[], nn.Module]) -> None:
    assert_equal_to_ordinary(build)


def test_a_state_dict_is_loaded() -> None:
    assert_equal_to_ordinary(loaded, ["1.num_batches_tracked"])


def rope() -> tuple[Tensor, Tensor, Tensor]:
    frequencies = 10_000.0 ** (-torch.arange(0, 8, 2).float() / 8)
    angles = torch.outer(torch.arange(6, device=frequencies.device), frequencies)
    turns = torch.polar(torch.ones_like(angles), angles)
    return angles.cos(), angles.sin(), torch.view_as_real(turns)


def signs_and_conjugates() -> tuple[Tensor, Tensor, Tensor]:
    z = torch.polar(torch.rand(3), torch.rand(3)).conj()
    z.imag[1:].mul_(2)
    return z, z.imag, z.resolve_conj()


def with_generator() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    first, second = torch.randn(3, generator=generator), torch.randn(3)
    return first, second.uniform_(generator=generator), torch.randn(2, generator=generator)


def with_probabilities() -> tuple[Tensor, Tensor, Tensor]:
    p = torch.rand(20)
    return torch.bernoulli(p), torch.multinomial(p, 5), torch.normal(p, 0.1)


def resized() -> tuple[Tensor, Tensor, Tensor]:
    x, y = torch.ones(3), torch.rand(6)
    alias = y.view(-1)
    x.resize_(6)[3:].copy_(y[:3])
    y.set_(x.untyped_storage(), 0, (2, 3))
    return x, y.t_().mul_(2), alias


def from_elsewhere() -> tuple[Tensor, ...]:
    real = torch.Tensor(4).normal_()  # made at once, from the same generator
    deferred = torch.rand(4)
    real[1:].copy_(deferred[1:])
    mixed = deferred * torch.tensor([1.0, 2.0, 3.0, 4.0]) + real
    deferred[torch.tensor([0, 2])] = 5.0
    torch.arange(3.0, out=real[1:])
    data = torch.tensor([deferred[0], mixed[1]]) * deferred.new_tensor([2.0, 3.0])
    return real, mixed, data, deferred.double().type_as(real)


def looked_at() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(12)
    y = x[x > 0].sort(descending=True).values
    while bool(x.max() > 0.5):
        x = torch.where(x > 0.5, torch.randn(12), x)
    before = float(x[0])
    x[0] = 9.0
    q, r = torch.linalg.qr(torch.randn(4, 3))
    assert f"{x[0]:.1f}" == "9.0"
    assert x.numpy()[0] == np.asarray(x)[0] == x.tolist()[0] == 9.0
    assert torch.equal(x, x.clone())
    return x, y * before, (q @ r)[x.unique().numel() % 4]


def old_and_new() -> tuple[Tensor, Tensor]:
    x = torch.randn(4)
    double = x * 2
    x.mul_(0.0)
    assert x.sum().item() == 0  # now the new values are at hand, and the old ones are asked for
    assert double.abs().sum().item() > 0
    assert x.sum().item() == 0  # and the other way round
    return x + double, double


def laid_out_otherwise() -> Tensor:
    _, _, v = torch.linalg.svd(torch.randn(3, 3))  # by columns on the CPU, by rows on meta
    return v.contiguous()


def on_named_devices() -> tuple[Tensor, Tensor, Tensor]:
    x = torch.rand(3, device="cpu")
    assert (x.device, x.is_cpu, x.is_meta) == (torch.device("cpu"), True, False)
    x.to("cpu").mul_(2)
    x.cpu().add_(1)
    x.to(x.new_zeros(2, device=x.device)).add_(torch.get_default_device().type == "cpu")
    copy.copy(x).add_(1)
    with torch.device("meta"):
        nn.Linear(3, 3)
    nn.Linear(3, 3, device="meta")
    return x, torch.zeros_like(x, device="cpu"), torch.empty_like(x, device="meta").is_meta + x


MAKES: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "mask": (lambda: torch.ones(4, 4).tril().bool(), []),
    "arange": (lambda: torch.arange(10).expand(1, -1), []),
    "data": (lambda: torch.tensor([1.0, 2.0]), ["b0"]),
    "rope": (rope, []),
    "conj": (signs_and_conjugates, []),
    "generator": (with_generator, []),
    "probabilities": (with_probabilities, []),
    "resized": (resized, []),
    "elsewhere": (from_elsewhere, ["b0", "b2", "b3"]),
    "looked_at": (looked_at, []),
    "old_and_new": (old_and_new, []),
    "svd": (laid_out_otherwise, []),
    "devices": (on_named_devices, []),
}


@pytest.mark.parametrize(("make", "made_at_once"), MAKES.values(), ids=MAKES)
def test_buffers(make: Callable[[], Any], made_at_once: list[str]) -> None:
    assert_equal_to_ordinary(lambda: Holder(make), made_at_once)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_is_that_of_the_construction(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        torch.set_default_dtype(dtype)
        try:
            return nn.Sequential(nn.Linear(3, 2), Holder(lambda: torch.linspace(0, 1, 7)))
        finally:
            torch.set_default_dtype(torch.float32)

    assert_equal_to_ordinary(build)
    assert torch.get_default_dtype() == torch.float32
    assert build()[0].weight.dtype == dtype


Program = list[tuple[int, int, int]]
STEPS: list[Callable[[list[Tensor], Tensor, Tensor], Any]] = [
    lambda pool, x, y: pool.append(torch.randn(4, 4)),
    lambda pool, x, y: pool.append(torch.arange(16.0).view(4, 4)),
    lambda pool, x, y: pool.append(torch.tensor([1.0, -2.0, 3.0, 0.5]) * x),
    lambda pool, x, y: pool.append(torch.rand_like(x)),
    lambda pool, x, y: pool.append(torch.bernoulli(x.sigmoid())),
    lambda pool, x, y: pool.append(x.t()),
    lambda pool, x, y: pool.append(x.flatten().view(4, 4)),
    lambda pool, x, y: pool.append(x.tanh() @ y.tanh()),
    lambda pool, x, y: pool.append(torch.cat([x[:1], y[1:]])),
    lambda pool, x, y: pool.append(torch.where(x > y, x, y)),
    lambda pool, x, y: pool.append(copy.deepcopy(nn.Parameter(x)).data),
    lambda pool, x, y: x.normal_(),
    lambda pool, x, y: x[1:3].uniform_(),
    lambda pool, x, y: x.zero_(),
    lambda pool, x, y: x.copy_(y.clone()),
    lambda pool, x, y: x[:, 1].fill_(0.25),
    lambda pool, x, y: x[2].copy_(y[1].clone()),
    lambda pool, x, y: x.sub_(y.clone()).mul_(0.5),
    lambda pool, x, y: x.masked_fill_(y.clone() > 0.5, -1.0),
    lambda pool, x, y: setattr(x, "data", y),
    lambda pool, x, y: x.mul_(0.5) if x.sum().item() > 1 else None,
    lambda pool, x, y: x[0, : len(y[0].clone()[y[0] > 0])].add_(1.0),
    lambda pool, x, y: nn.init.trunc_normal_(x, a=-0.9, b=1.1),
    lambda pool, x, y: torch.mul(x.clone(), 2.0, out=y),
]


def run(program: Program) -> nn.Module:
    def make() -> tuple[Tensor, ...]:
        pool = [torch.zeros(4, 4), torch.randn(4, 4)]
        for step, i, j in program:
            STEPS[step](pool, pool[i % len(pool)], pool[j % len(pool)])
        return tuple(pool)

    return Holder(make)


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9)), max_size=14
    )
)
def test_any_program(program: Program) -> None:
    assert_equal_to_ordinary(lambda: run(program))


def test_tied_tensors_come_out_tied() -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["table"].weight
        whole = torch.randn(4, 2)
        model["rows"] = nn.ParameterList([whole[:3], whole[1:]])
        return model

    assert_equal_to_ordinary(build)
    with deferred_init() as tape:
        model = build()
    tensors = named_tensors(model)
    assert list(tensors) == ["table.weight", "rows.0", "rows.1"]
    upper, lower = tape.materialize(tensors["rows.0"]), tape.materialize(tensors["rows.1"])
    upper[1] = 5.0
    assert torch.equal(lower[0], torch.full((2,), 5.0))
    del upper, lower
    assert not bool((tape.materialize(tensors["rows.1"]) == 5.0).any())  # nobody held it


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the real storages that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for tensor in returned if isinstance(returned, tuple | list) else [returned]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.storages.add(tensor.untyped_storage())
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return returned


def test_the_peak_is_one_parameter() -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)), nn.Linear(32, 64)).apply(
            init_weights
        )

    with LiveBytes() as live, deferred_init() as tape:
        model = build()
    assert live.peak == 64 * 32 * 4  # for the generator to move on
    tensors = named_tensors(model)
    with LiveBytes() as live:
        for tensor in tensors.values():
            assert tape.materialize(tensor).shape == tensor.shape
    assert live.peak == 64 * 32 * 4
    held = []
    with LiveBytes() as live:
        held += [tape.materialize(tensor) for tensor in tensors.values()]
    assert live.peak == sum(tensor.nbytes for tensor in held)  # the count sees what is held


@pytest.mark.parametrize("init", [nn.init.trunc_normal_, nn.init.orthogonal_])
def test_the_peak_does_not_grow_with_the_model(init: Callable[[Tensor], Any]) -> None:
    def peaks(depth: int) -> tuple[int, int]:
        torch.manual_seed(SEED)
        with LiveBytes() as recording, deferred_init() as tape:
            model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(depth)))
            for layer in model:
                torch.manual_seed(SEED)
                init(layer.weight)
        assert not recording.storages
        with LiveBytes() as making:
            for tensor in named_tensors(model).values():
                tape.materialize(tensor)
        return recording.peak, making.peak

    assert peaks(4) == peaks(1)


def test_temporaries_go_when_they_are_used() -> None:
    def chain() -> Tensor:
        x = torch.randn(1000)
        for _ in range(8):
            x = x * 0.9
        return x

    with deferred_init() as tape:
        holder = Holder(chain)
    with LiveBytes() as live:
        tape.materialize(holder.b0)
    assert live.peak == 2 * 4000


class Draws(TorchDispatchMode):
    """Counts the random operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        real = not any(isinstance(arg, Tensor) and arg.is_meta for arg in args)
        self.count += real and torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def test_only_what_a_tensor_depends_on_runs_again() -> None:
    with deferred_init() as tape:
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(5))).apply(init_weights)
        before = copy.deepcopy(model[2])
        model[2].weight.data.normal_()
    with Draws() as draws:
        tape.materialize(model[2].weight)
    assert draws.count == 1  # neither the other layers' nor what was overwritten
    with Draws() as draws:
        tape.materialize(before.weight)
    assert draws.count == 1  # nor what came later


def test_a_loop_that_looks_again_and_again_goes_on_from_where_it_was() -> None:
    def build() -> Tensor:  # as `nn.init.trunc_normal_` does since torch 2.13
        drawn = torch.empty(500).normal_()
        while (outside := drawn.abs() > 0.8).any():
            drawn = torch.where(outside, torch.empty_like(drawn).normal_(), drawn)
        return drawn

    torch.manual_seed(SEED)
    with Draws() as ordinary:
        build()
    assert ordinary.count > 5
    torch.manual_seed(SEED)
    with Draws() as draws, deferred_init():
        build()
    assert draws.count == 2 * ordinary.count  # once for the generator, once for the look


def test_what_was_read_stays_as_it_was_read() -> None:
    with deferred_init():
        x = torch.zeros(20)
        read = x.numpy()
        x[1:].uniform_()
    assert not read.any()


def test_an_outer_device_is_not_heeded() -> None:
    torch.manual_seed(SEED)
    expected = nn.Linear(3, 2).weight
    torch.manual_seed(SEED)
    with torch.device("meta"), deferred_init() as tape:
        layer = nn.Linear(3, 2)
    assert_same(tape.materialize(layer.weight), expected)


def test_without_a_tape_there_are_no_values() -> None:
    with deferred_init() as tape:
        other = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"no values for a meta tensor of size \(2, 2\)"):
        tape.materialize(other.weight)
    real = torch.ones(2)
    assert tape.materialize(real) is real


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def write_to_numpy() -> None:
    torch.ones(2).numpy()[0] = 3.0


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (sparse, r"_to_sparse.* not strided\. Build the model in `__init__`"),
    "numpy": (write_to_numpy, "read-only"),
    "share": (lambda: torch.ones(2).share_memory_(), r"`Tensor\.share_memory_` needs memory"),
    "mixed": (lambda: torch.ones(2) + torch.ones(2, device="meta"), "made with device='meta'"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_deferred_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), deferred_init():
        make()
    assert not torch.ones(2).is_meta


def test_mistakes_read_as_without() -> None:
    def wrong() -> Tensor:
        return torch.ones(2, 3) @ torch.ones(2, 3)

    with pytest.raises(RuntimeError) as ordinary:
        wrong()
    with pytest.raises(RuntimeError) as deferred, deferred_init():
        wrong()
    assert str(deferred.value) == str(ordinary.value)


def test_only_shapes_draws_next_to_nothing() -> None:
    with deferred_init(only_shapes=True):
        layer = nn.Linear(2**30, 2**20)  # would take days, and four petabytes
    assert layer.weight.is_meta
    assert layer.weight.shape == (2**20, 2**30)


def test_only_shapes_gives_other_values_to_who_draws_again() -> None:
    with deferred_init(only_shapes=True):
        values = {float(torch.rand(())) for _ in range(3)}
        steps = [float(x) for x in torch.linspace(0, 1, 3)]
    assert len(values) == 3
    assert steps == [0.0, 0.5, 1.0]
