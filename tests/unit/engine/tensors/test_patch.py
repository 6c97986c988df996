"""What users put on parameters goes to the parameters in their place."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.patch import replacement


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
