"""Strategies as a configuration names them, through jsonargparse, as LightningCLI does."""

from __future__ import annotations

import jsonargparse
import pytest
from lightning.pytorch.strategies import Strategy

import lightning_dist

NAMES = sorted(name for name in lightning_dist.__all__ if name.endswith("Strategy"))


def built(class_path: str, **arguments: object) -> lightning_dist.DDPStrategy:
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--strategy", type=Strategy)
    config = {"class_path": class_path, "init_args": arguments}
    return parser.instantiate(parser.parse_object({"strategy": config})).strategy


def test_all_strategies_are_tried() -> None:
    assert len(NAMES) == 8


@pytest.mark.parametrize("name", NAMES)
def test_a_strategy_takes_the_arguments_of_all(name: str) -> None:
    strategy = built(f"lightning_dist.{name}", timeout_s=7.0)
    assert type(strategy).__name__ == name
    assert strategy.timeout_seconds == 7.0
    with pytest.raises(jsonargparse.ArgumentError, match="timeouts"):
        built(f"lightning_dist.{name}", timeouts=7.0)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_argument_is_named_with_the_one_that_it_resembles(name: str) -> None:
    expected = f"^{name} has no argument 'timeout'. Did you mean 'timeout_s'?"
    with pytest.raises(TypeError, match=expected):
        getattr(lightning_dist, name)(timeout=7.0)
