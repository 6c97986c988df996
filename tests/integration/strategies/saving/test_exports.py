"""Exports of what several ranks have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist.__main__ import main
from lightning_dist.checkpoint import is_sharded
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool
from tests.integration.conformance.common import joined
from tests.integration.conformance.strategies import ENTRIES


def train(name: str, path: str) -> dict[str, Any]:
    entry = ENTRIES[name]
    module = make_module(optimizer="adamw", depth=3)
    trainer = make_trainer(devices=entry.devices, strategy=entry.make(), max_steps=1)
    trainer.fit(module, make_loader(16), make_loader(8))
    trainer.save_checkpoint(path)
    return state_of(module)


@pytest.mark.some("fsdp-2")
@pytest.mark.parametrize("name", ["fsdp-2", "pipeline-gpipe-2", "tp-2", "pp-2-shard-2", "fsdp-2x2"])
def test_the_weights_are_those_that_ranks_hold(
    workers: WorkerPool, tmp_path: Path, name: str
) -> None:
    source = tmp_path / "in.ckpt"
    states = workers.run(ENTRIES[name].devices, train, name, str(source))
    assert is_sharded(source)
    expected = joined(states)
    for kind in ("safetensors", "torch"):
        main(["export", str(source), str(tmp_path / kind), "--format", kind])
    from safetensors.torch import load_file

    for found in (load_file(tmp_path / "safetensors"), torch.load(tmp_path / "torch")):
        assert found.keys() >= expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
