"""The strategies' parts that need no other process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import lightning_dist
from lightning_dist.engine.comms.failures.peer_failure import Failure, RankFailedError
from lightning_dist.engine.tensors.rng import seeded
from lightning_dist.strategies.mesh_runtime.checks import check_anomaly, check_precision


def test_the_strategies_have_names() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    names = ["auto_dist", "pipeline", "pipeline_gpipe", "pipeline_1f1b", "pipeline_pipedream"]
    assert set(names) <= set(StrategyRegistry.available_strategies())
    assert StrategyRegistry.get("pipeline_pipedream").asynchronous
    kinds = (
        "Auto",
        "DDP",
        "FSDP",
        "Hogwild",
        "Mesh",
        "ParameterServer",
        "Pipeline",
        "TensorParallel",
    )
    names = [f"{kind}Strategy" for kind in kinds]
    assert {*names, "OuterOptimizer", "plan"} <= set(lightning_dist.__all__)
    assert lightning_dist.__all__ == sorted(lightning_dist.__all__)
    assert all(hasattr(lightning_dist, name) for name in lightning_dist.__all__)


def test_random_numbers_depend_on_their_name_alone() -> None:
    device = torch.device("cpu")
    torch.manual_seed(0)
    undisturbed = torch.rand(3)
    torch.manual_seed(0)
    with seeded(1, 2, device=device):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), undisturbed)
    with seeded(1, 2, device=device):
        assert torch.equal(torch.rand(3), first)
    with seeded(1, 3, device=device):
        assert not torch.equal(torch.rand(3), first)


def test_a_failure_becomes_the_same_error_elsewhere() -> None:
    try:
        raise ValueError("bad value\nsecond line")
    except ValueError as error:
        failure = Failure.from_exception(2, error)
    assert str(failure) == "Rank 2 failed first: ValueError: bad value"
    assert repr(failure.to_exception()) == repr(ValueError("bad value\n(raised on rank 2)"))
    error = Failure(1, "stage.NotCalledError: no call", is_value_error=True).to_exception()
    assert repr(error) == repr(ValueError("no call\n(raised on rank 1)"))
    error = Failure(1, "KeyError: 'k'", "Traceback ...\n").to_exception()
    assert isinstance(error, RankFailedError)
    assert "Traceback ..." in str(error.__cause__)


def test_importing_the_package_changes_no_trainer() -> None:
    code = """
import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors import accelerator_connector as theirs

classes = (pl.Trainer, pl.LightningModule, theirs._AcceleratorConnector)
before = [dict(vars(one)) for one in classes]
import lightning_dist
assert [dict(vars(one)) for one in classes] == before
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_tensor_parallel_ranks_have_one_scale() -> None:
    check_precision("16-mixed", 1)
    check_precision("bf16-mixed", 2)
    with pytest.raises(ValueError, match=r"'16-mixed' with tp_size=2.*'bf16-mixed'"):
        check_precision("16-mixed", 2)
    check_anomaly(is_asked=False, tp_size=2)
    with pytest.raises(ValueError, match="detect_anomaly=True with tp_size=2"):
        check_anomaly(is_asked=True, tp_size=2)
