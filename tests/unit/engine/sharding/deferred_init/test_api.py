from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.sharding.deferred_init.api import deferred_init, named_tensors
from lightning_dist.engine.sharding.fully_shard import fill
from tests.unit.engine.sharding.deferred_init.ordinary import (
    SEED,
    assert_equal_to_ordinary,
    assert_same,
)


def test_tied_tensors_come_out_tied() -> None:
    def build() -> nn.Module:
        model = nn.ModuleDict({"table": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["table"].weight
        whole = torch.randn(4, 2)
        model["rows"] = nn.ParameterList([whole[:3], whole[1:]])
        return model

    assert_equal_to_ordinary(build)
    with deferred_init() as tape:
        model = build()
    tensors = named_tensors(model)
    assert list(tensors) == ["table.weight", "rows.0", "rows.1"]
    upper, lower = tape.materialize(tensors["rows.0"]), tape.materialize(tensors["rows.1"])
    upper[1] = 5.0
    assert torch.equal(lower[0], torch.full((2,), 5.0))
    del upper, lower
    assert not bool((tape.materialize(tensors["rows.1"]) == 5.0).any())  # nobody held it


def test_what_was_read_stays_as_it_was_read() -> None:
    with deferred_init():
        x = torch.zeros(20)
        read = x.numpy()
        x[1:].uniform_()
    assert not read.any()


def test_an_outer_device_is_not_heeded() -> None:
    torch.manual_seed(SEED)
    expected = nn.Linear(3, 2).weight
    torch.manual_seed(SEED)
    with torch.device("meta"), deferred_init() as tape:
        layer = nn.Linear(3, 2)
    assert_same(tape.materialize(layer.weight), expected)


def test_without_a_tape_there_are_no_values() -> None:
    with deferred_init() as tape:
        other = nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"no values for a meta tensor of size \(2, 2\)"):
        tape.materialize(other.weight)
    real = torch.ones(2)
    assert tape.materialize(real) is real


def sparse() -> Tensor:
    return torch.eye(3).to_sparse()


def write_to_numpy() -> None:
    torch.ones(2).numpy()[0] = 3.0


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (sparse, r"_to_sparse.* not strided\. Build the model in `__init__`"),
    "numpy": (write_to_numpy, "read-only"),
    "share": (lambda: torch.ones(2).share_memory_(), r"`Tensor\.share_memory_` needs memory"),
    "mixed": (lambda: torch.ones(2) + torch.ones(2, device="meta"), "made with device='meta'"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_deferred_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), deferred_init():
        make()
    assert not torch.ones(2).is_meta


def test_mistakes_read_as_without() -> None:
    def wrong() -> Tensor:
        return torch.ones(2, 3) @ torch.ones(2, 3)

    with pytest.raises(RuntimeError) as ordinary:
        wrong()
    with pytest.raises(RuntimeError) as deferred, deferred_init():
        wrong()
    assert str(deferred.value) == str(ordinary.value)


def test_only_shapes_draws_next_to_nothing() -> None:
    with deferred_init(only_shapes=True):
        layer = nn.Linear(2**30, 2**20)  # would take days, and four petabytes
    assert layer.weight.is_meta
    assert layer.weight.shape == (2**20, 2**30)


def test_only_shapes_gives_other_values_to_who_draws_again() -> None:
    with deferred_init(only_shapes=True):
        values = {float(torch.rand(())) for _ in range(3)}
        steps = [float(x) for x in torch.linspace(0, 1, 3)]
    assert len(values) == 3
    assert steps == [0.0, 0.5, 1.0]


def test_a_buffer_of_several_names_stays_one() -> None:
    with deferred_init() as tape:
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        mask = torch.tril(torch.ones(2, 2))
        for part in model.values():
            part.register_buffer("mask", mask)
    tensors = named_tensors(model)
    fill(model, tensors, lambda name: tape.materialize(tensors[name]), torch.device("cpu"))
    assert model["a"].mask is model["b"].mask
    assert model["b"].mask.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
