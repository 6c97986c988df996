from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.engine.tensors.forward_ast import written_by_forward


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = self.setting = 0

    def forward(self, x: Any) -> Any:
        self.one, (self.two, _) = x, (x, x)
        self.three += 1
        self.four[0] = x
        self.five.append(x)
        self.six.add_(x)
        self.part.seven: Any = x
        self.look(self.setting)
        return x + self.untouched.clone()

    def look(self, x: Any) -> None:
        self.eight = torch.sort(x)
        self.forward(x)  # in a circle

    def reset(self) -> None:
        self.setting = 1


class Extended(Writing):
    def forward(self, x: Any) -> Any:
        self.nine = x
        return super().forward(x)


WRITTEN = {"one", "two", "three", "four", "five", "six", "seven", "eight"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Writing, WRITTEN), (Extended, WRITTEN | {"nine"}), (nn.Linear, set()), (nn.Identity, set())],
)
def test_names_what_a_forward_writes(kind: type, names: set[str]) -> None:
    assert written_by_forward(kind) == names


def test_what_has_no_source_writes_nothing_that_is_known() -> None:
    space: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n def forward(self, x):\n  self.last = x", space)
    assert written_by_forward(space["Made"]) == frozenset()
