from __future__ import annotations

from dataclasses import replace
from math import isnan

import pytest

from lightning_dist.callbacks.stage_balancer import conclude, print_balance, seconds_of_batch
from lightning_dist.engine.planning.balance import find_balance
from lightning_dist.engine.planning.layer_costs import LayerCosts, RankProfile, StepCosts
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


def test_where_no_cut_helps_the_slow_layer_is_named() -> None:
    quick = LayerCosts("quick", 0.001, 0.001)
    costs = StepCosts((quick, LayerCosts("slow", 0.030, 0.031), quick))
    balance = find_balance(costs, PipelineShape("1f1b", 4, (2, 1), rank=0))
    measured = replace(balance, measured_step_seconds=0.271, batches=(2, 4))
    assert conclude(measured, 0.05) == (
        "No cut saves 5%: a step took 271.00 ms (median of batches 2 to 4). Stage 0 is the slowest,"
        " with 63.00 ms per micro-batch (mean 32.50 ms); its layer slow takes 61.00 ms."
    )
    unmeasured = replace(measured, measured_step_seconds=float("nan"))
    assert conclude(unmeasured, 0.05).startswith("No cut saves 5%: measured in batches 2 to 4. S")
    assert conclude(replace(measured, better_step_seconds=0.001), 0.05).startswith("partition=")


def test_a_batch_is_a_share_of_the_time_between_updates() -> None:
    profiles = [RankProfile({}, {}, {}, 0.0, seconds) for seconds in (4.0, float("nan"), 8.0)]
    assert seconds_of_batch(profiles, 4) == 1.5
    assert isnan(seconds_of_batch(profiles[1:2], 4))
