"""What of a checkpoint's loader states a replica takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_dist.strategies.base.loaders.replica_loaders import take_loader_states


def saved(*states: Any) -> dict[str, Any]:
    loops = {"fit_loop": {"state_dict": {"combined_loader": states[0]}}}
    return {"loops": loops, "lightning_dist_loaders": list(states)}


def taken(checkpoint: dict[str, Any]) -> Any:
    return checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]


def test_each_replica_takes_its_own() -> None:
    for replica in (0, 1):
        checkpoint = saved([{"place": 3}], [{"place": 5}])
        take_loader_states(checkpoint, replica, 2)
        assert taken(checkpoint) == [{"place": (3, 5)[replica]}]
        assert "lightning_dist_loaders" not in checkpoint


def test_another_number_of_replicas_takes_the_first_one_and_is_told() -> None:
    # A random generator's state is a tensor, which has no truth value.
    checkpoint = saved([{"random": torch.zeros(3)}], [{"random": torch.ones(3)}])
    with pytest.warns(UserWarning, match="states of 2 data replicas' loaders, and there are 1"):
        take_loader_states(checkpoint, 0, 1)
    assert torch.equal(taken(checkpoint)[0]["random"], torch.zeros(3))


def test_a_checkpoint_without_them_stays_as_it_is() -> None:
    checkpoint: dict[str, Any] = {"state_dict": {}}
    take_loader_states(checkpoint, 1, 2)
    assert checkpoint == {"state_dict": {}}
