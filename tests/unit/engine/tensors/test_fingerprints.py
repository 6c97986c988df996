"""Tensors are told apart by numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_dist.engine.tensors import fingerprints
from lightning_dist.engine.tensors.fingerprints import fingerprint, projection

TYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("at_once", [3, 2**20])
def test_any_element_changes_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, at_once: int
) -> None:
    monkeypatch.setattr(fingerprints, "_AT_ONCE", at_once)
    values = torch.arange(8.0).reshape(2, 4) if dtype != torch.bool else torch.zeros(2, 4)
    tensor = values.to(dtype)
    found = {int(fingerprint(tensor))}
    for index in range(8):
        changed = tensor.clone()
        changed.view(-1)[index] = 100.0 if dtype != torch.bool else True
        found.add(int(fingerprint(changed)))
    assert len(found) == 9
    assert int(fingerprint(tensor.clone())) in found
    assert int(fingerprint(tensor.t().contiguous().t())) in found


def test_what_a_sum_does_not_see() -> None:
    before, up = drawn(8), torch.tensor([1.0, -1.0] * 4, dtype=torch.float64) / 64
    exact = (before * 1024).round() / 1024
    moved = exact + up
    assert exact.sum() == moved.sum()
    assert fingerprint(exact) != fingerprint(moved)
    assert abs(projection(exact)[0] - projection(moved)[0]) > 1e-3
    assert fingerprint(exact) != fingerprint(exact.flip(0))


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
def test_shapes(shape: tuple[int, ...]) -> None:
    tensor = drawn(*shape)
    assert fingerprint(tensor).dtype == torch.int64
    product, norm = projection(tensor)
    assert norm == pytest.approx(float(tensor.norm()))
    assert abs(product) <= norm * max(1, tensor.numel()) ** 0.5


def test_rounding_is_little_beside_the_norm() -> None:
    tensor = drawn(1000)
    (product, norm), (rounded, _) = projection(tensor), projection(tensor.float())
    assert 0.0 < abs(product - rounded) < 1e-7 * norm
