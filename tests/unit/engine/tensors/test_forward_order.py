from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from lightning_dist.engine.tensors.forward_ast import runs_before, used_by_forward


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("head", "body", "stem"):
            setattr(self, name, nn.Identity())


class Straight(Parts):
    def forward(self, x: Any) -> Any:
        x = self.stem(x) if self.stem is not None else x
        for layer in self.body:
            x = layer(x)
        return self.head(x)


class Nested(Parts):
    def forward(self, x: Any) -> Any:
        return self.head(self.body(x=self.stem(x)))


class OtherName(Parts):
    def forward(module, x: Any) -> Any:  # noqa: N805
        return module.head(module.body(module.stem(x)))


class Extended(Straight):
    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.head.bias


@pytest.mark.parametrize("class_", [Straight, Nested, OtherName, Extended])
def test_the_code_says_what_comes_first(class_: type[nn.Module]) -> None:
    module = class_()
    assert runs_before(module, "stem", "body")
    assert runs_before(module, "body", "head")
    assert not runs_before(module, "head", "stem")


def test_without_code_the_order_of_registration_decides() -> None:
    assert runs_before(Parts(), "head", "body")
    assert not runs_before(Parts(), "stem", "body")


class Helped(Extended):
    def forward(self, x: Any) -> Any:
        if self.training:
            x = self.changed(x)
        return super().forward(x)

    def changed(self, x: Any) -> Any:
        return self.noise(self.changed(x) if self.again else x)


def test_methods_and_base_classes_are_followed() -> None:
    assert used_by_forward(Nested) == ("stem", "body", "head")
    of_bases = ("stem", "body", "head")
    assert used_by_forward(Extended) == of_bases
    assert used_by_forward(Helped) == (*of_bases, "training", "again", "changed", "noise")
    assert used_by_forward(nn.Linear) == ("weight", "bias")
    assert used_by_forward(type("Made", (nn.Module,), {"forward": len})) is None
