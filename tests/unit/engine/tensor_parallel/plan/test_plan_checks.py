from __future__ import annotations

import pytest
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.apply import check_styles
from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.layers.projection import is_projection
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.regions import Partners


class Adapted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_layer_that_computes_more_than_its_class_says_is_no_projection() -> None:
    assert is_projection(nn.Linear(2, 2))
    assert not is_projection(Adapted(2, 2))
    assert not is_projection(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="needs a plain nn.Linear with .* but it is a Adapted"):
        resolve_plan(nn.Sequential(Adapted(2, 2)), {"0": "colwise"})


@pytest.mark.parametrize("option", [{"sparse": True}, {"max_norm": 1.0}])
def test_an_embedding_that_looks_at_all_tokens_together_is_refused(option: dict[str, int]) -> None:
    model = nn.Sequential(nn.Embedding(4, 2, **option))
    with pytest.raises(ValueError, match="without max_norm, scale_grad_by_freq and sparse"):
        resolve_plan(model, {"0": "vocab"})


def test_the_partner_of_a_layer_is_the_nearest_one_by_name() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.ModuleDict({"out": nn.Linear(8, 8), "qkv": nn.Linear(8, 24)}),
            "up": nn.Linear(8, 32),
            "down": nn.Linear(32, 8),
        }
    )
    styles = {
        "attention.out": Style.ROWWISE,
        "attention.qkv": Style.COLWISE,
        "up": Style.COLWISE,
        "down": Style.ROWWISE,
    }
    assert Partners(styles).stacked_in(model, "attention.qkv") == 3
    assert Partners(styles).stacked_in(model, "up") == 1


def test_heads_beside_an_mlp_need_not_be_shared_out() -> None:
    block = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
    block.num_heads = 1
    styles = {"up": Style.COLWISE, "down": Style.ROWWISE}
    check_styles(block, styles, tp_size=2, sequence_parallel=False)
