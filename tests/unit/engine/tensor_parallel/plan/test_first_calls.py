"""Arguments that no trial has known of are proven when they are first given."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from lightning_dist.engine.tensor_parallel.plan.first_calls import FirstCalls
from tests.unit.engine.tensor_parallel.plan.test_verify import (
    TP,
    WIDTH,
    Attention,
    Mlp,
    model_of,
    stacked,
)

LENGTH = 6


class Masked(Attention):
    """Adds what it is given to the scores, as it is or by a slope for each head."""

    def forward(  # type: ignore[override]
        self, x: Tensor, mask: Tensor | None = None, distances: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.split(self.qkv(x), self.num_heads)
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = scores + mask
        if distances is not None:
            slopes = torch.arange(1.0, self.num_heads + 1, dtype=x.dtype)
            scores = scores - slopes[:, None, None] * distances
        summed: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return summed


class Scaled(Mlp):
    """``scale`` and ``power`` mean nothing, or something with all features."""

    def __init__(self) -> None:
        super().__init__(F.gelu)

    def forward(  # type: ignore[override]
        self, x: Tensor, residual: Any = 0.0, scale: float | None = None, *, is_first: bool = True
    ) -> Tensor:
        hidden = self.fc1(x) + (0 if isinstance(residual, float) else residual.mean())
        if scale not in (None, 1.0):
            hidden = scale * F.normalize(hidden, dim=-1)
        summed: Tensor = self.fc2(hidden if is_first else hidden.softmax(-1))
        return summed


class Long(Mlp):
    """Does something else with more positions, or more dims, than the first trials have."""

    def __init__(self) -> None:
        super().__init__(F.gelu)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.fc1(x)
        summed: Tensor = self.fc2(hidden.softmax(-1) if x.dim() > 3 or x.shape[1] > 5 else hidden)
        return summed


class Keyed(Mlp):
    """Wants a dictionary, so that it could not be tried before."""

    def __init__(self) -> None:
        super().__init__(F.gelu)

    def forward(self, x: Tensor, given: dict[str, Any]) -> Tensor:  # type: ignore[override]
        hidden = self.fc1(x) * given["scale"]
        summed: Tensor = self.fc2(hidden.softmax(-1) if given["mixes"] else hidden)
        return summed


class Cache:
    """Holds what an earlier layer computed, as a cache of keys does."""

    def __init__(self) -> None:
        self.held = torch.ones(3, requires_grad=True) * 2


class Cached(Mlp):
    """Is given the cache of all layers."""

    def __init__(self) -> None:
        super().__init__(F.gelu)

    def forward(self, x: Tensor, cache: Cache) -> Tensor:  # type: ignore[override]
        summed: Tensor = self.fc2((self.fc1(x) * cache.held.sum()).softmax(-1))
        return summed


def watched(part: nn.Module, *, parts: int = 1) -> nn.Module:
    """Returns a module whose calls are watched as if it were sharded."""
    model = model_of(part)
    styles = {n: style for n, style in find_plan(model, TP).styles.items() if n.startswith("1.")}
    assert styles
    FirstCalls(model, styles, TP, parts=parts).watch()
    return part


def x(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (3, LENGTH)), WIDTH)


CAUSAL = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)
AT = torch.arange(float(LENGTH))
DISTANCES = (AT[:, None] - AT).abs()
Call = tuple[Callable[[], nn.Module], tuple[Any, ...], dict[str, Any]]
CAN: dict[str, Call] = {
    "nothing more": (lambda: Masked(stacked), (x(),), {}),
    "a mask": (lambda: Masked(stacked), (x(), CAUSAL), {}),
    "a mask without padding": (lambda: Masked(stacked), (x(),), {"mask": torch.zeros(LENGTH)}),
    "a scale of one": (Scaled, (x(),), {"scale": 1.0}),
    "a residual": (Scaled, (x(), x()), {}),
    "few positions": (Long, (x(3, 5),), {}),
    "a dictionary": (Keyed, (x(), {"scale": torch.ones(()), "mixes": False}), {}),
    "many samples": (lambda: Masked(stacked), (x(40, 100), torch.zeros(40, 1, 1, 100)), {}),
}
CANNOT: dict[str, Call] = {
    "distances": (lambda: Masked(stacked), (x(), None, DISTANCES), {}),
    "distances of zero": (lambda: Masked(stacked), (x(),), {"distances": 0 * DISTANCES}),
    "a scale": (Scaled, (x(),), {"scale": 2.0}),
    "a flag": (Scaled, (x(),), {"is_first": False}),
    "many positions": (Long, (x(3, 6),), {}),
    "more dims": (Long, (x(2, 2, 2),), {}),
    "a dictionary": (Keyed, (x(), {"scale": 2.0, "mixes": True}), {}),
    "zeros": (Scaled, (torch.zeros(2, 3, WIDTH),), {"scale": 2.0}),
    "half precision": (Scaled, (x().bfloat16(),), {"scale": 2.0}),
    "an object with a graph": (Cached, (x(), Cache()), {}),
    "many samples": (lambda: Masked(stacked), (x(40, 6),), {"distances": DISTANCES}),
}


def call(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Calls it as it is trained, under autocast."""
    with torch.autocast("cpu"):
        found: Tensor = part(*args, **kwargs)
    return found


@pytest.mark.parametrize("name", CAN)
def test_what_adds_up_goes_on_and_nobody_notices_the_proof(name: str) -> None:
    make, args, kwargs = CAN[name]
    part = watched(make())
    given, numbers = deepcopy((args, kwargs)), torch.get_rng_state()
    calls: list[Any] = []
    part.get_submodule("fc1" if isinstance(part, Mlp) else "qkv").register_forward_hook(
        lambda *_: calls.append("behind")
    )
    assert torch.equal(call(part, args, kwargs), call(deepcopy(part), *given))
    assert calls == ["behind"] * 2
    assert torch.equal(torch.get_rng_state(), numbers)


@pytest.mark.parametrize("name", CANNOT)
def test_what_does_not_add_up_is_refused(name: str) -> None:
    make, args, kwargs = CANNOT[name]
    part = watched(make())
    for _ in range(2):  # a second time, too
        with pytest.raises(ValueError, match=r"Leave '1\..* does not add up .*first called with: "):
            call(part, args, kwargs)


def test_each_kind_of_call_is_proven_once_and_for_all_modules_of_a_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "lightning_dist.engine.tensor_parallel.plan.first_calls"
    from lightning_dist.engine.tensor_parallel.plan import first_calls

    proofs: list[bool] = []
    prove = first_calls.prove

    def counted(*args: Any, training: bool) -> Any:
        proofs.append(training)
        return prove(*args, training=training)

    monkeypatch.setattr(f"{module}.prove", counted)
    model = nn.Sequential(*(Masked(stacked) for _ in range(2)))
    styles = {f"{i}.{n}": s for i in range(2) for n, s in STYLES.items()}
    FirstCalls(model, styles, TP).watch()
    for _ in range(3):
        for part in model:
            part(x())
            part(x(2, 9))
            part(x(), mask=CAUSAL)
    assert proofs == [True, True]
    model.eval()(x())
    assert proofs == [True, True, False]


STYLES = {"qkv": Style.COLWISE, "out": Style.ROWWISE}


def test_a_part_of_the_sequence_may_come_with_a_mask_of_all_of_it() -> None:
    halves = x(3, LENGTH // 2)
    for kwargs, words in (({"mask": CAUSAL}, "must match"), ({"distances": DISTANCES}, "add up")):
        part = watched(Masked(stacked), parts=2)
        # Without its neighbours' positions the module itself cannot compute with the mask.
        with pytest.raises((RuntimeError, ValueError), match=words):
            part(halves, **kwargs)


def test_what_cannot_be_run_is_warned_of_once() -> None:
    part = watched(Keyed())
    given = {"scale": torch.ones(1, 1, 12), "mixes": False, "of the rank": Local()}
    with pytest.warns(UserWarning, match="not proven that '1', a Keyed, may be cut.*with: Tensor"):
        call(part, (x(), given), {})
    call(part, (x(), given), {})


class Local:
    """Has no copies."""

    def __deepcopy__(self, _: Any) -> Local:
        raise TypeError("no copies")


def test_a_dry_run_proves_nothing() -> None:
    part = watched(Scaled())
    with FakeTensorMode(allow_non_fake_inputs=True):
        call(part, (x(),), {"scale": 2.0})
    with pytest.raises(ValueError, match="add up"):
        call(part, (x(),), {"scale": 2.0})


def test_what_crosses_is_left_as_it_is() -> None:
    kept: list[Tensor] = [torch.ones(())]
    part = watched(Remembering())
    part(x(), kept)
    assert len(kept) == 2


class Remembering(Mlp):
    """Writes into what it is given."""

    def __init__(self) -> None:
        super().__init__(F.gelu)

    def forward(self, x: Tensor, kept: Any = ()) -> Tensor:  # type: ignore[override]
        if kept:
            kept.append(x)
        return super().forward(x)
