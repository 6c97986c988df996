from __future__ import annotations

import pytest

from lightning_dist.callbacks.stage_balancer import print_balance
from lightning_dist.engine.planning.balance import find_balance
from lightning_dist.engine.planning.layer_costs import LayerCosts, StepCosts
from lightning_dist.engine.schedules.registry import PipelineShape


@pytest.mark.parametrize("with_tables", [True, False])
def test_tables_are_printed_where_there_is_a_choice(
    capsys: pytest.CaptureFixture[str], with_tables: bool
) -> None:
    costs = StepCosts((LayerCosts("first", 0.1, 0.2), LayerCosts("second", 0.1, 0.2)))
    balance = find_balance(costs, PipelineShape("1f1b", 4, (1, 1), rank=0))
    print_balance(balance, "The conclusion.", (), 5, print_tables=with_tables)
    *tables, conclusion = capsys.readouterr().out.splitlines()
    assert conclusion == "The conclusion."
    assert any("second" in line for line in tables) == bool(tables) == with_tables
