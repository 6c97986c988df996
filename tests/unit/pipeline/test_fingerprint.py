from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dist.pipeline.fingerprint import fingerprint


def batch(**changes: Any) -> dict[str, Any]:
    x = torch.arange(1000.0).reshape(10, 100)
    return {"x": x, "y": torch.zeros(10, dtype=torch.bool), "name": "a", **changes}


def test_equal_batches_have_equal_fingerprints() -> None:
    assert fingerprint(batch(), read_devices=False) == fingerprint(batch(), read_devices=False)
    assert 0 <= fingerprint(batch(), read_devices=True) < 2**32


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.arange(1000.0).reshape(10, 100).flip(0)},
        {"x": torch.arange(1000.0).reshape(20, 50)},
        {"x": torch.arange(1000).reshape(10, 100)},
        {"x": torch.tensor(1.0)},
        {"y": torch.ones(10, dtype=torch.bool)},
        {"y": torch.zeros(10, 0)},
    ],
)
def test_other_batches_have_others(changes: dict[str, Any]) -> None:
    assert fingerprint(batch(**changes), read_devices=False) != fingerprint(
        batch(), read_devices=False
    )


def test_any_layout_and_dtype() -> None:
    odd = [
        torch.ones(3, 4).t(),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64),
        torch.eye(3).to_sparse(),
        torch.tensor(3),
        torch.zeros(0),
    ]
    assert fingerprint(odd, read_devices=True) == fingerprint(odd, read_devices=True)


def test_devices_are_read_only_when_allowed() -> None:
    on_meta = {"x": torch.ones(3, device="meta")}
    assert fingerprint(on_meta, read_devices=False) == fingerprint(
        {"x": torch.zeros(3, device="meta")}, read_devices=False
    )
    with pytest.raises(NotImplementedError):
        fingerprint(on_meta, read_devices=True)
