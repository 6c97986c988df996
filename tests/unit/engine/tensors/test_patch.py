"""What users put on parameters goes to the parameters in their place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.patch import add_gradient, add_with_hooks, replacement


class Packed(nn.Parameter):
    """Keeps values in an attribute, as quantised parameters do."""


def test_attributes_and_hooks_go_to_a_parameter_in_another_s_place() -> None:
    called: list[str] = []
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    parameter.requires_grad_()
    parameter.rate = 3  # type: ignore[attr-defined]
    handle = parameter.register_hook(lambda _: called.append("before"))
    parameter.register_post_accumulate_grad_hook(lambda _: called.append("behind"))
    made = replacement(parameter, torch.zeros(2))
    made.sum().backward()
    assert called == ["before", "behind"]
    assert vars(made) == {"rate": 3}
    handle.remove()
    made.sum().backward()
    assert called == ["before", "behind", "behind"]


def test_a_derived_class_keeps_its_attributes_to_itself() -> None:
    parameter = Packed(torch.ones(2), requires_grad=False)
    parameter.scales = torch.ones(2)  # type: ignore[attr-defined]
    made = replacement(parameter, torch.zeros(2))
    assert vars(made) == {}
    assert isinstance(made, Tensor)
    assert not made.requires_grad


def test_hooks_may_use_and_write_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.register_hook(lambda gradient: gradient + parameter)
    parameter.register_post_accumulate_grad_hook(lambda own: own.mul_(0.5))
    add_with_hooks(parameter, torch.ones(2))
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [2.0, 2.0]
    assert not parameter.grad.requires_grad
    assert parameter.tolist() == [0.5, 0.5]


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_whole_gradient_is_added_to_rows() -> None:
    rows = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2))
    total = add_gradient(torch.ones(3, 2), rows)
    assert total.tolist() == [[1.0, 1.0], [2.0, 2.0], [1.0, 1.0]]
    assert add_gradient(rows, total) is total
    assert total[1].tolist() == [3.0, 3.0]
