"""A loader whose order is shared is, but for the order, the user's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_dist.engine.tensors.rng import RandomStream
from lightning_dist.strategies.base.loaders.shared_order import share_order


def make_shared(seed: int) -> Any:
    torch.manual_seed(seed)
    loader = StatefulDataLoader(torch.arange(12), batch_size=2, shuffle=True)
    return share_order(loader, lambda: RandomStream(seed, 0), None, lambda: None)


def read(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_a_loader_goes_on_where_its_state_says() -> None:
    """Whatever numbers are drawn when the run is resumed."""
    loader = make_shared(seed=1)
    batches = iter(loader)
    begun = read(next(batches) for _ in range(2))
    state = loader.state_dict()
    rest = read(batches)
    assert sorted(index for batch in begun + rest for index in batch) == list(range(12))
    resumed = make_shared(seed=2)
    resumed.load_state_dict(state)
    assert read(resumed) == rest
