"""A saved optimizer state is for the present optimizers, or is refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dist.engine.checkpoint.optimizer_state import GroupNames, by_present_names


def saved(*groups: list[Any]) -> dict[str, Any]:
    every = [name for group in groups for name in group]
    state = {name: {"sum": position} for position, name in enumerate(every)}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": group} for group in groups]}


def test_the_names_of_a_group_take_the_present_order() -> None:
    (found,) = by_present_names([saved(["a", "b"], ["c"])], [[["b", "a"], ["c"]]])
    assert [group["params"] for group in found["param_groups"]] == [["b", "a"], ["c"]]
    assert found["state"] == {"a": {"sum": 0}, "b": {"sum": 1}, "c": {"sum": 2}}


def test_numbers_become_names() -> None:
    (found,) = by_present_names([saved([0, 1], [2])], [[["a", "b"], ["c"]]])
    assert found == saved(["a", "b"], ["c"])


@pytest.mark.parametrize(
    ("present", "words"),
    [
        ([["c"], ["a", "b"]], r"groups of \[2, 1\] parameters, the present one of \[1, 2\]"),
        ([["a", "b", "c"]], r"groups of \[2, 1\] parameters, the present one of \[3\]"),
        ([["a", "c"], ["b"]], "group 0 of the checkpoint's optimizer has b, where .* one has c"),
    ],
)
def test_other_groups_are_refused(present: GroupNames, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        by_present_names([saved(["a", "b"], ["c"])], [present])


def test_another_number_of_optimizers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"states of 1 optimizers, and `.*` made 2\. Resume with"):
        by_present_names([saved(["a"])], [[["a"]], [["b"]]])
