"""Numbers of all heads in an attention's code are refused, if no proof shows what they do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.verify import check_parts

WIDTH = 12  # three heads of four features

STYLES = {name: Style.COLWISE for name in ("q_proj", "k_proj", "v_proj")}
STYLES |= {"out_proj": Style.ROWWISE}


class Base(nn.Module):
    """Takes what no trial can guess, so that nothing is proven before a run."""

    def __init__(self, num_heads: int | None = None) -> None:
        super().__init__()
        for name in STYLES:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        if num_heads is not None:
            self.num_heads = num_heads

    def compute(self, x: Tensor, state: dict[str, Tensor], *size: int) -> Tensor:
        q, k, v = (self.heads(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        weights = torch.softmax(q @ k.mT + state["more"], -1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 4)).transpose(1, 2)


class Both(Base):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        q = self.q_proj(x).view(x.shape[0], x.shape[1], 3, 4)
        return self.out_proj(q.flatten(2) + state["more"])


class InMethod(Base):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.compute(x, state)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (3, 4)).transpose(1, 2)


class InTuple(Base):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        q = self.q_proj(x).reshape((x.shape[0], -1, 3, 4))
        return self.out_proj(q.flatten(2) + state["more"])


class Width(Base):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        q = self.q_proj(x).view(-1, x.shape[1], 12)
        return self.out_proj(q + state["more"])


class Heads(Base):
    """Would be silently wrong: as many heads on each rank, each smaller."""

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        q = self.q_proj(x).view(x.shape[0], x.shape[1], 3, -1)
        return self.out_proj(q.flatten(2) + state["more"])


class Free(Base):
    def forward(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        x = x.view(x.shape[0], 3, -1, WIDTH).flatten(1, 2)[:, :1]
        return self.compute(x, state, 3, 4)


@pytest.mark.parametrize("count", [None, 3])
@pytest.mark.parametrize("kind", [Both, InMethod, InTuple, Width])
def test_what_would_not_run_with_some_of_the_heads(kind: type[Base], count: int | None) -> None:
    with pytest.raises(ValueError, match=r"^Leave .* out of plan=, .* or -1 .*, in .*\(.*\)") as e:
        check_parts(kind(count), STYLES, 3)
    assert "has numbers of all heads in its code" in str(e.value)


def test_what_would_run_with_other_heads() -> None:
    with pytest.raises(ValueError, match=r"numbers of all heads .*\[1\], 3, -1"):
        check_parts(Heads(3), STYLES, 3)


@pytest.mark.parametrize("count", [None, 6])
def test_other_numbers_pass(count: int | None) -> None:
    check_parts(Free(count), STYLES, 3)
