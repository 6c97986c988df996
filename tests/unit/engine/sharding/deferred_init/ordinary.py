"""What a module built in the ordinary way holds, and a comparison with one that was deferred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.sharding.deferred_init.api import deferred_init, named_tensors

SEED = 11


def assert_same(given: Tensor, expected: Tensor) -> None:
    assert given.device.type == "cpu"
    assert (given.dtype, given.shape) == (expected.dtype, expected.shape)
    assert given.stride() == expected.stride()
    both = [t.detach().resolve_conj().resolve_neg().flatten() for t in (given, expected)]
    assert torch.equal(*(tensor.view(torch.uint8) for tensor in both))  # for NaN is not NaN


def assert_equal_to_ordinary(
    build: Callable[[], nn.Module], made_at_once: Sequence[str] = ()
) -> None:
    """Compares values, in any order of making them, and the generator's state afterwards."""
    torch.manual_seed(SEED)
    ordinary = build()
    after, expected = torch.get_rng_state(), named_tensors(ordinary)
    torch.manual_seed(SEED)
    with deferred_init() as tape:
        module = build()
    assert torch.equal(torch.get_rng_state(), after)
    tensors = named_tensors(module)
    assert list(tensors) == list(expected)
    assert [name for name, tensor in tensors.items() if not tensor.is_meta] == list(made_at_once)
    for name in [*tensors, *reversed(tensors)]:
        assert_same(tape.materialize(tensors[name]), expected[name])
    assert torch.equal(torch.get_rng_state(), after)
    for name, parameter in ordinary.named_parameters():
        assert module.get_parameter(name).requires_grad == parameter.requires_grad


class Holder(nn.Module):
    """Holds what a function makes: one tensor, or several."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        made = make()
        for index, tensor in enumerate(made if isinstance(made, tuple) else (made,)):
            self.register_buffer(f"b{index}", tensor)


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02 / module.in_features**0.5)
        nn.init.zeros_(module.bias)
