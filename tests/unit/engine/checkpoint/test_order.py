"""Ranks take a checkpoint's tensors in one order, for gathering some of them is collective."""

from __future__ import annotations

import pytest
import torch

from lightning_dist.engine.checkpoint import files


class Hashed(str):
    """A key of which the test, not the process, says where sets put it."""

    place: int

    def __hash__(self) -> int:
        return self.place


@pytest.mark.parametrize("places", [(0, 1, 2), (2, 1, 0)])
def test_sections_are_taken_in_one_order_however_a_process_hashes(
    monkeypatch: pytest.MonkeyPatch, places: tuple[int, ...]
) -> None:
    sections = {}
    for (name, prefix), place in zip(files.SECTIONS.items(), places, strict=True):
        key = Hashed(name)
        key.place = place
        sections[key] = prefix
    monkeypatch.setattr(files, "SECTIONS", sections)
    checkpoint = {key: {"weight": torch.ones(1)} for key in sections}
    tensors, _ = files.split_parts(checkpoint, None)
    assert [*tensors] == ["model.weight", "current.weight", "outer_momentum.weight"]
