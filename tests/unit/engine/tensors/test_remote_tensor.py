from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.tensors.remote_tensor import absent, absent_value

CPU = torch.device("cpu")
WEIGHT = nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
GONE = absent(WEIGHT, WEIGHT.dtype, CPU, "it is on stage 5")
ONES = torch.ones(3, 2)


@pytest.mark.parametrize(
    "question",
    [
        lambda t: (t.shape, t.size(), t.size(1), t.dim(), t.ndim, len(t), t.numel(), t.nbytes),
        lambda t: (t.dtype, t.device, t.layout, t.is_cuda, t.is_cpu, t.is_meta, t.get_device()),
        lambda t: (t.requires_grad, t.is_leaf, t.is_floating_point(), torch.is_complex(t)),
        lambda t: (t.element_size(), t.itemsize, t.stride(), t.is_sparse, torch.numel(t)),
        lambda t: (torch.numel(input=t), torch.is_complex(input=t)),
    ],
)
def test_says_what_the_tensor_is(question: Callable[[Tensor], Any]) -> None:
    assert question(GONE) == question(WEIGHT)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: ONES.to(t),
        lambda t: ONES.to(t.device, t.dtype),
        lambda t: ONES.type_as(t),
        lambda t: ONES.type_as(other=t),
        lambda t: t.new_zeros(2, 2),
        lambda t: t.new_tensor([1.0, 2.0]),
        lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device),
    ],
)
def test_others_are_made_like_it(make: Callable[[Tensor], Tensor]) -> None:
    made = make(GONE)
    assert type(made) is Tensor
    torch.testing.assert_close(made, make(WEIGHT), rtol=0, atol=0)


def test_a_line_for_all_ranks_may_freeze_it() -> None:
    gone = absent(WEIGHT, WEIGHT.dtype, CPU, "it is on stage 5")
    assert gone.requires_grad_(False) is gone
    assert not gone.requires_grad
    gone.requires_grad = True
    assert gone.requires_grad


@pytest.mark.parametrize(
    "use",
    [
        lambda t: t + 1,
        lambda t: ONES * t,
        lambda t: t.to(torch.float64),
        lambda t: t.sum(),
        lambda t: float(t),
        lambda t: bool(t),
        lambda t: t[0],
        lambda t: list(t),
        lambda t: t.grad,
        lambda t: t.tolist(),
        lambda t: t.add_(1),
        lambda t: torch.cat([ONES, t]),
        lambda t: torch.cat(tensors=[ONES, t]),
        lambda t: F.linear(ONES, weight=t),
        lambda t: torch.zeros_like(t),
        lambda t: f"{t:.2f}",
    ],
)
@pytest.mark.parametrize("given", [GONE, absent_value("it is on stage 5")], ids=str)
def test_its_values_are_refused(given: Tensor, use: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="it is on stage 5"):
        use(given)


@pytest.mark.parametrize("look", [lambda t: t.detach(), lambda t: t.data])
def test_who_looks_finds_unknown_values(look: Callable[[Tensor], Tensor]) -> None:
    seen = look(GONE)
    assert (seen.shape, seen.dtype, seen.device) == (WEIGHT.shape, WEIGHT.dtype, CPU)
    assert seen.isnan().all()
    count = absent(torch.ones(1, dtype=torch.long), torch.long, CPU, "it is on stage 5")
    for given in (count, absent_value("it is on stage 5")):  # no integer is unknown
        with pytest.raises(ValueError, match="it is on stage 5"):
            look(given)


def histogram(seen: Tensor) -> list[float]:
    known = seen.flatten()[~seen.flatten().isnan()]
    return [*known.float().cpu().histc(3).tolist(), float(seen.detach().clone().numel())]


@pytest.mark.parametrize(
    "look",
    [
        histogram,
        lambda t: float(t.mean().item()),
        lambda t: t.float().cpu().numpy(),
        lambda t: t.mul_(2.0).add_(ONES[0, 0].item()),
        lambda t: torch.stack([t, t]).tolist(),
        lambda t: t.norm() < 1.0,
    ],
)
def test_a_logger_may_draw_unknown_values(look: Callable[[Tensor], Any]) -> None:
    assert look(GONE.data) is not None


def set_data(known: Tensor, value: Tensor) -> None:
    known.data = value


def set_item(known: Tensor, value: Tensor) -> None:
    known[:] = value


def add_in_place(known: Tensor, value: Tensor) -> None:
    known += value


@pytest.mark.parametrize(
    "write",
    [
        lambda t, u: t.data.mul_(0.9).add_(u, alpha=0.1),
        lambda t, u: t.data.mul_(0.9).add_(0.1 * u),
        lambda t, u: t.lerp_(u, 0.1),
        lambda t, u: t.copy_(u.detach().clone()),
        lambda t, u: set_data(t, t.data * 0.9 + u * 0.1),
        set_item,
        add_in_place,
        lambda t, u: torch._foreach_add_([t], [u]),
        lambda t, u: torch.add(t, u, out=t),
    ],
)
def test_unknown_values_are_written_nowhere(write: Callable[[Tensor, Tensor], Any]) -> None:
    known = torch.ones_like(WEIGHT)
    with pytest.raises(ValueError, match="it is on stage 5"):
        write(known, GONE.data)
    assert not known.isnan().any()


@pytest.mark.parametrize(
    "use",
    [
        *(len, lambda t: t.shape, lambda t: t.dtype, ONES.to),
        lambda t: torch.numel(input=t),
        lambda t: ONES.type_as(other=t),
    ],
)
def test_of_a_value_nothing_is_known(use: Callable[[Tensor], Any]) -> None:
    with pytest.raises(ValueError, match="made by block 2"):
        use(absent_value("made by block 2"))


def test_shows_and_copies_itself() -> None:
    assert repr(GONE) == "RemoteTensor((3, 2), torch.bfloat16, device='cpu')"
    assert copy.deepcopy(GONE) is GONE
    assert len({GONE, GONE}) == 1
