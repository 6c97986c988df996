from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from torch import nn

from lightning_dist.engine.precision.policy import HalfPrecision
from lightning_dist.engine.splitting.cut import cut, remote_layers
from lightning_dist.engine.splitting.remote_layer import describe
from lightning_dist.strategies.base.precision_plugin import HalfPrecisionPlugin

BF16, FP32 = torch.bfloat16, torch.float32


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.LayerNorm(2, bias=False))
        self.layers = nn.Sequential(layer, nn.Linear(2, 2))


def dtypes(root: nn.Module) -> list[torch.dtype]:
    """What a parameter of another rank's layer computes in, as a step on this rank sees it."""
    (found,) = remote_layers(root)
    imitated = [p.dtype for p in found[2].meta_copy().parameters()]
    described = [p.dtype for p in describe(found[2], torch.device("cpu")).parameters()]
    assert imitated == described
    return imitated


def under_half_precision() -> tuple[Root, HalfPrecisionPlugin]:
    root, plugin = Root(), HalfPrecisionPlugin(HalfPrecision(BF16))
    cut(root.layers, (1, 1), [1])
    plugin.convert_module(root)
    plugin.connect(root, [], [])
    return root, plugin


@pytest.mark.parametrize("copied", [deepcopy, lambda root: pickle.loads(pickle.dumps(root))])
def test_a_copy_of_a_stage_knows_the_dtypes_of_other_ranks(copied: object) -> None:
    root, _ = under_half_precision()
    copy = copied(root)  # type: ignore[operator]
    assert dtypes(root) == dtypes(copy) == [BF16, FP32]
    assert copy.layers[1](torch.ones(1, 2, dtype=torch.float64)).dtype == FP32


def test_a_run_leaves_no_dtypes_behind() -> None:
    root, plugin = under_half_precision()
    plugin.teardown()
    assert dtypes(root) == [FP32, FP32]
    assert not root.layers[1]._forward_pre_hooks
