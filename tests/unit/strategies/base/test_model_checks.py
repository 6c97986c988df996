from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_dist.strategies.base.model_checks import check_initialised, check_no_max_norm


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_are_written_into_are_named(
    kind: type[nn.Embedding] | type[nn.EmbeddingBag],
) -> None:
    plain, written = nn.Embedding(4, 2), kind(4, 2, max_norm=1.0)
    model = nn.Sequential(plain, written.requires_grad_(False))
    with pytest.raises(ValueError, match=r"\['1'\] with max_norm .*: ranks differ\. Leave"):
        check_no_max_norm(model, "ranks differ")
    check_no_max_norm(plain, "ranks differ")


def test_a_weight_that_another_module_has_too() -> None:
    written, head = nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 4, bias=False)
    model = nn.Sequential(written, head)
    check_no_max_norm(model, "the head differs", only_shared=True)
    head.weight = written.weight
    with pytest.raises(ValueError, match="the head differs"):
        check_no_max_norm(model, "the head differs", only_shared=True)


def test_lazy_modules_before_their_first_call_are_named() -> None:
    model = nn.Sequential(nn.LazyLinear(4, bias=False), nn.LazyBatchNorm1d(affine=False))
    names = r"\['0.weight', '1.running_mean', '1.running_var'\].*Call the model once in `setup`"
    with pytest.raises(ValueError, match=names):
        check_initialised(model)
    model(torch.zeros(2, 3))
    check_initialised(model)
