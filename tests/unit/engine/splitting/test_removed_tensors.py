from __future__ import annotations

import torch
from torch import nn

from lightning_dist.engine.splitting.removed_tensors import RemovedTensors
from lightning_dist.engine.tensors.module_state import state_kept


def test_a_state_loads_after_attributes_were_restored_around_a_cut_that_moved_nothing() -> None:
    module = nn.ModuleDict({"own": nn.Linear(2, 2), "away": nn.Linear(2, 2)})
    whole = {name: torch.ones_like(value) for name, value in module.state_dict().items()}
    removed = RemovedTensors(module, "{name!r} is away")
    removed.take({"away.weight", "away.bias"})
    with state_kept(module):
        removed.restore({})
        removed.take(set())
    module.load_state_dict(dict(whole))
    removed.restore({"away.weight": torch.zeros(2, 2), "away.bias": torch.zeros(2)})
    module.load_state_dict(dict(whole))
    assert all(torch.equal(value, whole[name]) for name, value in module.state_dict().items())
