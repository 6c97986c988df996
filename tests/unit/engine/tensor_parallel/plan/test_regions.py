"""Which layers belong together, and that finding them takes one look at each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from os.path import commonprefix
from typing import Any

import pytest
from torch import nn

from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.regions import Partners, head_widths, holders
from lightning_dist.engine.tensor_parallel.plan.verify import local_in
from tests.unit.engine.tensor_parallel.plan.parts import holder

STYLES = (Style.COLWISE, Style.ROWWISE, Style.ROWWISE_SCATTER, Style.LOCAL)


def nearest(styles: dict[str, Style], name: str) -> str | None:
    places = {other: place for place, other in enumerate(styles)}

    def distance(other: str) -> tuple[int, bool, int]:
        shared = commonprefix([name.split("."), other.split(".")])  # type: ignore[list-item]
        after = places[other] - places[name]
        return -len(shared), after < 0, abs(after)

    return min((other for other in styles if styles[other].sums_up), key=distance, default=None)


@pytest.mark.parametrize("seed", range(100))
def test_a_partner_is_the_nearest_layer_of_all(seed: int) -> None:
    drawn = random.Random(seed)
    paths = (".".join(drawn.choices("abc", k=drawn.randint(1, 4))) for _ in range(20))
    styles = {name: drawn.choice(STYLES) for name in paths}
    partners = Partners(styles)
    assert {n: partners.of(n) for n in styles} == {n: nearest(styles, n) for n in styles}


class Counted(dict[str, Any]):
    """Counts how often somebody goes through all of it."""

    passes = 0

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return super().__iter__()

    def items(self) -> Any:
        self.passes += 1
        return super().items()


def test_a_plan_of_many_layers_is_gone_through_a_few_times() -> None:
    pair = {"q": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "o": nn.Linear(2, 2)}
    model = nn.Sequential(*(holder(**pair) for _ in range(50)))
    own = {"q": Style.COLWISE, "norm": Style.LOCAL, "o": Style.ROWWISE}
    styles = Counted({f"{i}.{name}": style for i in range(50) for name, style in own.items()})
    partners = Partners(styles)
    assert {partners.stacked_in(model, name) for name in list(styles)} == {1}
    found = holders(model, styles)
    assert found == {str(i): [f"{i}.q", f"{i}.o"] for i in range(50)}
    assert local_in(styles, Counted(found)) == {str(i): [f"{i}.norm"] for i in range(50)}
    assert head_widths(model, styles) == dict.fromkeys(found, 2)
    assert styles.passes < 20
