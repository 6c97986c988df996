"""Errors about gradients name parameters, and not too many."""

from __future__ import annotations

import pytest
from torch import nn

from lightning_dist.engine.data_parallel.missing_gradients import check_gradients, some_names
from lightning_dist.strategies.mesh_runtime.replica_checks import check_compressible


def test_eight_names_are_listed_and_more_are_hinted_at() -> None:
    assert some_names(["a", "b"]) == "['a', 'b']"
    assert some_names(list("abcdefghi")) == f"{list('abcdefgh')} and more"


def test_long_lists_of_parameters_are_cut() -> None:
    with pytest.raises(ValueError, match=r"on \['0', .* '7'\] and more\. Freeze"):
        check_gradients([str(number) for number in range(20)])
    empty = nn.Sequential(*(nn.LayerNorm(0) for _ in range(9)))
    with pytest.raises(
        ValueError, match=r"matrices of \['0.weight', .* '3.bias'\] and more, which"
    ):
        check_compressible(empty, "powersgd")
