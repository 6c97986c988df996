from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_dist.engine.pipeline.stage import ForwardInterceptor
from lightning_dist.engine.splitting.layers import LayerSequence


def intercept(net: nn.Sequential, outside: Callable[..., Any] | None = None) -> ForwardInterceptor:
    return ForwardInterceptor(LayerSequence(net), outside)


def double(x: Any) -> Any:
    return 2 * x


def test_a_step_runs_what_it_is_given_and_goes_on_or_leaves() -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net)
    assert interceptor.run(lambda: net(3) + 1, double, leaves=False) == 7
    assert interceptor.run(lambda: net(3) + 1, double, leaves=True) == 6
    assert interceptor.run(lambda: net(3), lambda _: None, leaves=True) is None
    interceptor.detach()
    assert net(3) == 3


@pytest.mark.parametrize("kind", [Exception, BaseException])
def test_a_step_cannot_catch_its_own_end(kind: type[BaseException]) -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net)

    def step() -> int:
        try:
            net(3)
        except kind:
            return -1
        return 0

    assert interceptor.run(step, double, leaves=True) == 6


def test_a_module_that_is_not_called_once_is_refused() -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net, lambda x, by: f"{x} by {by}")
    with pytest.raises(ValueError, match="without a call"):
        interceptor.run(lambda: 1, double, leaves=False)
    with pytest.raises(ValueError, match="more than once"):
        interceptor.run(lambda: net(net(1)), double, leaves=False)
    assert net(1, by=2) == "1 by 2"  # outside of a step


def test_an_error_leaves_nothing_behind() -> None:
    net = nn.Sequential(nn.Identity())
    interceptor = intercept(net)
    with pytest.raises(KeyError):
        interceptor.run(lambda: {}[net(1)], double, leaves=False)
    assert torch.equal(net(torch.ones(2)), torch.ones(2))
    assert interceptor.run(lambda: net(1), double, leaves=False) == 2
