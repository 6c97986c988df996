"""Checkpoints whose weights are mapped from their file."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_dist.engine.checkpoint.files import OPTIMIZERS, SECTIONS
from lightning_dist.engine.checkpoint.mapped import load_mapped


def test_only_the_weights_and_what_is_no_tensor_are_kept(tmp_path: Path) -> None:
    weights = {"weight": torch.arange(6.0)}
    file = tmp_path / "one.ckpt"
    others = {key: [] for key in OPTIMIZERS} | {key: weights for key in SECTIONS}
    torch.save({**others, "state_dict": weights, "epoch": 3}, file)
    found = load_mapped(file, tmp_path)
    assert found.keys() == {"state_dict", "epoch"}
    assert torch.equal(found["state_dict"]["weight"], weights["weight"])
