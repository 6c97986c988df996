from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.unit.engine.sharding.deferred_init.ordinary import (
    Holder,
    assert_equal_to_ordinary,
)


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
