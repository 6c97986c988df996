"""What looks as if it could be cut, and can or cannot."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.plan import proof
from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from lightning_dist.engine.tensor_parallel.plan.trial_run import kind_of
from lightning_dist.engine.tensor_parallel.plan.verify import check_parts, find_mismatches

WIDTH, HEADS, TP = 8, 2, 2
Split = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Attention(nn.Module):
    """Has one layer for queries, keys and values."""

    def __init__(self, split: Callable[[Tensor, int], Tensor], *, swaps: bool = False) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.split, self.swaps = split, swaps

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.qkv(x), self.num_heads)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        if self.swaps:
            mixed = mixed.transpose(2, 3)
        summed: Tensor = self.out(mixed.flatten(2))
        return summed


def stacked(qkv: Tensor, heads: int) -> Tensor:
    return qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)


def by_head(qkv: Tensor, heads: int) -> Tensor:
    return qkv.unflatten(-1, (heads, 3, -1)).permute(3, 0, 2, 1, 4)


class Grouped(nn.Module):
    """Has fewer keys than queries; ``repeat`` says which queries each serves."""

    def __init__(self, repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 2
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.repeat = repeat

    def forward(self, x: Tensor) -> Tensor:
        projected = (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projected)
        mixed = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v))
        summed: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return summed


class Mlp(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = x + self.fc2(self.between(self.fc1(x)))
        return summed


class Norm(nn.Module):
    """Keeps its layers in a dictionary, and what it is between them in a module of its own."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 12), "act": between, "c_proj": nn.Linear(12, WIDTH)}
        )

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = self.mlp["c_proj"](self.mlp["act"](self.mlp["c_fc"](x)))
        return summed


CAN: dict[str, nn.Module] = {
    "stacked": Attention(stacked),
    "keys beside each other": Grouped(lambda k: k.repeat_interleave(2, 1)),
    "gelu": Mlp(F.gelu),
    "listed": Norm(nn.ReLU()),
}
CANNOT: dict[str, nn.Module] = {
    "queries, keys and values of each head": Attention(by_head),
    "heads merged the other way": Attention(stacked, swaps=True),
    "keys one after the other": Grouped(lambda k: k.repeat(1, 2, 1, 1)),
    "softmax": Mlp(lambda h: h.softmax(-1)),
    "flipped": Mlp(lambda h: h.flip(-1)),
    "layer norm": Mlp(lambda h: F.layer_norm(h, h.shape[-1:])),
    "norm without parameters": Norm(nn.LayerNorm(12, elementwise_affine=False)),
    "width in the code": Mlp(lambda h: h.view(-1, 4, 12)),
}


class ByPlace(Mlp):
    """Is another layer at each second place."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(F.gelu)
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        summed: Tensor = self.fc2(hidden.softmax(-1) if self.layer_idx % 2 else hidden)
        return summed


class ByType(Mlp):
    def __init__(self, layer_idx: int) -> None:
        super().__init__(F.gelu)
        self.layer_type = ("plain", "mixed")[layer_idx]

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        summed: Tensor = self.fc2(hidden.softmax(-1) if self.layer_type == "mixed" else hidden)
        return summed


class Placed(Mlp):
    """Knows its place only to pass it on."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__(F.gelu)
        self.layer_idx = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        id(self.layer_idx)
        return super().forward(x)


def model_of(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Embedding(6, WIDTH), module, nn.Linear(WIDTH, 6))


def plan_of(model: nn.Module) -> set[str]:
    return {name for name in find_plan(model, TP).styles if name.startswith("1.")}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", CAN)
def test_what_adds_up_is_cut_and_nobody_notices_the_proof(name: str, device: str) -> None:
    model = deepcopy(model_of(CAN[name])).to(device)
    before, numbers = deepcopy(model), torch.get_rng_state()
    calls: list[Any] = []
    for part in model.modules():
        part.register_forward_pre_hook(lambda *_: calls.append("before"))
        part.register_forward_hook(lambda *_: calls.append("behind"))
    assert plan_of(model)
    assert calls == []
    assert torch.equal(torch.get_rng_state(), numbers)
    assert str(model) == str(before)
    if device == "cpu":
        pairs = zip(model.parameters(), before.parameters(), strict=True)
        assert all(torch.equal(now, then) for now, then in pairs)


@pytest.mark.parametrize("name", CANNOT)
def test_what_does_not_add_up_stays_whole(name: str) -> None:
    assert not plan_of(model_of(CANNOT[name]))


def test_modules_of_a_class_are_not_all_alike() -> None:
    mlps = [Mlp(F.gelu), Mlp(lambda h: h.softmax(-1)), Mlp(F.gelu)]
    assert plan_of(model_of(nn.Sequential(*mlps))) == {"1.0.fc1", "1.0.fc2", "1.2.fc1", "1.2.fc2"}


class Flagged(Mlp):
    """Does something else if a setting of it says so, or in training only."""

    def __init__(self, *, mixes: bool = False, mixes_in_training: bool = False) -> None:
        super().__init__(F.gelu)
        self.mixes, self.mixes_in_training = mixes, mixes_in_training

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        if self.mixes or (self.mixes_in_training and self.training):
            hidden = hidden.softmax(-1)
        summed: Tensor = self.fc2(hidden)
        return summed


def test_modules_with_other_settings_are_not_alike() -> None:
    mlps = [Flagged(), Flagged(mixes=True), Flagged(mixes_in_training=True), Flagged()]
    plan = plan_of(model_of(nn.Sequential(*mlps)))
    assert plan == {"1.0.fc1", "1.0.fc2", "1.3.fc1", "1.3.fc2"}


@pytest.mark.parametrize("name", ["0", "1.fc2", "2"])
def test_a_forward_of_a_layer_s_own_is_not_lost(name: str) -> None:
    model = model_of(Mlp(F.gelu))
    layer = model.get_submodule(name)
    compute = layer.forward
    layer.forward = lambda x: 2 * compute(x)  # type: ignore[method-assign]
    assert name not in find_plan(model, TP).styles
    style = {"0": "vocab", "1.fc2": "rowwise", "2": "colwise_gather"}[name]
    with pytest.raises(ValueError, match=f"'{name}' .*has a forward of its own"):
        resolve_plan(model, {name: style})


def test_a_plan_that_does_not_add_up_is_refused() -> None:
    model = model_of(CANNOT["queries, keys and values of each head"])
    styles = resolve_plan(model, {"1.qkv": "colwise", "1.out": "rowwise"})
    with pytest.raises(ValueError, match=r"ranks of '1' give to 'out' does not add up.*off by"):
        check_parts(model, styles, TP)


def test_a_width_in_the_code_is_explained() -> None:
    model = model_of(CANNOT["width in the code"])
    styles = resolve_plan(model, {"1.fc1": "colwise", "1.fc2": "rowwise"})
    with pytest.raises(ValueError, match="'fc2', a Linear of '1', cannot .* a part"):
        check_parts(model, styles, TP)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"1.fc1": "colwise"}, "own features in '1.fc1'.*no layer sums up"),
        ({"1.fc2": "rowwise"}, "sums up .* in '1.fc2'.*no layer beside it"),
        ({"1.fc*": "colwise", "1.fc2": "rowwise", "2": "rowwise"}, "sums up .* in '2'"),
    ],
)
def test_a_region_begins_and_ends(plan: dict[str, str], words: str) -> None:
    model = model_of(CAN["gelu"])
    with pytest.raises(ValueError, match=words):
        check_parts(model, resolve_plan(model, plan), TP)


class Normed(Mlp):
    """Has a norm of its input, and one of what is between its layers, of each feature by itself."""

    def __init__(self) -> None:
        super().__init__(F.gelu)
        self.norm, self.scale = nn.LayerNorm(WIDTH), Scale()

    def forward(self, x: Tensor) -> Tensor:
        summed: Tensor = x + self.fc2(self.scale(self.fc1(self.norm(x))))
        return summed


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize(
    ("local", "words"),
    [("1.norm", "'norm' of '1' is 'local'.* same on all ranks"), ("2", "'2' .*nothing is cut")],
)
def test_what_is_local_meets_features_of_the_rank(local: str, words: str) -> None:
    model = model_of(Normed())
    plan = {"1.fc1": "colwise", "1.fc2": "rowwise", "1.scale": "local"}
    check_parts(model, resolve_plan(model, plan), TP)
    with pytest.raises(ValueError, match=f"(?i){words}"):
        check_parts(model, resolve_plan(model, plan | {local: "local"}), TP)


class Rotating(Attention):
    """Rotates queries and keys as its users ask for it."""

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(x), self.num_heads)
        q, k = (t * cos + torch.cat((-t[..., 2:], t[..., :2]), -1) * sin for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v)
        summed: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return summed


class InPairs(Rotating):
    def forward(self, x: Tensor, position_embeddings: Any = None, mask: Any = None) -> Tensor:
        return self.rotated(x, *position_embeddings)


class InTwo(Rotating):
    def forward(self, x: Tensor, start: int, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        return self.rotated(x, cos[start:], sin[start:])


class Complex(Rotating):
    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        both = torch.cat((freqs_cis, freqs_cis), -1)
        return self.rotated(x, both.real, both.imag)


@pytest.mark.parametrize("kind", [InPairs, InTwo, Complex])
def test_rotations_are_guessed(kind: type[Rotating]) -> None:
    assert plan_of(model_of(kind(stacked))) == {"1.qkv", "1.out"}
    assert plan_of(model_of(kind(by_head))) == set()


class Odd(Attention):
    """Wants more than an activation, and what it is nobody can tell."""

    def forward(self, x: Tensor, more: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x * more["scale"])


class Scaled(Attention):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * scale)


class Rated(Scaled):
    def forward(self, x: Tensor, *, rate: float) -> Tensor:  # type: ignore[override]
        return super().forward(x, torch.full((), float(rate)))


@pytest.mark.parametrize("kind", [Scaled, Rated])
def test_another_activation_or_a_number_is_guessed(kind: type[Attention]) -> None:
    assert plan_of(model_of(kind(stacked))) == {"1.qkv", "1.out"}
    assert plan_of(model_of(kind(by_head))) == set()


def test_what_cannot_be_run_is_taken_at_its_word() -> None:
    model = model_of(Odd(by_head))
    assert plan_of(model) == {"1.qkv", "1.out"}
    assert list(find_mismatches(model, find_plan(model, TP).styles, TP)) == []


@pytest.mark.parametrize("kind", [ByPlace, ByType])
def test_a_layer_that_asks_for_its_place_is_proven_by_itself(kind: Callable[[int], Mlp]) -> None:
    model = nn.Sequential(nn.Embedding(6, WIDTH), kind(0), kind(1), nn.Linear(WIDTH, 6))
    styles = find_plan(model, TP).styles
    assert {name for name in styles if name.startswith("1.")} == {"1.fc1", "1.fc2"}
    assert not {name for name in styles if name.startswith("2.")}


def test_a_place_that_is_passed_on_makes_no_other_kind() -> None:
    assert kind_of(Placed(0)) == kind_of(Placed(1))
    assert kind_of(ByPlace(0)) != kind_of(ByPlace(1))


def test_copies_are_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each takes a block's weights in float64: gigabytes of a large model.
    made: list[weakref.ref[Tensor]] = []
    random_copy = proof.random_copy

    def noted(*args: Any) -> nn.Module:
        copy = random_copy(*args)
        made.extend(map(weakref.ref, copy.parameters()))
        return copy

    monkeypatch.setattr(proof, "random_copy", noted)
    model = nn.Sequential(model_of(Attention(stacked)), model_of(Mlp(F.gelu)))
    gc.collect()
    gc.disable()
    try:
        find_plan(model, TP)
        assert len(made) > 4
        assert not [tensor for tensor in made if tensor() is not None]
    finally:
        gc.enable()
