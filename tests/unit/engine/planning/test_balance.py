from __future__ import annotations

import pytest

from lightning_dist.engine.planning.balance import Balance, find_balance, step_seconds
from lightning_dist.engine.planning.layer_costs import LayerCosts, RankProfile, StepCosts
from lightning_dist.engine.schedules.registry import PipelineShape

LOPSIDED = StepCosts(
    tuple(LayerCosts(f"{i}", size, 2 * size) for i, size in enumerate((4.0, 1.0, 1.0, 2.0))),
    own_forward_seconds=0.25,
    own_backward_seconds=0.5,
    loss_forward_seconds=1.0,
    loss_backward_seconds=2.0,
    update_seconds=3.0,
)


def shape(schedule: str, num_microbatches: int, *cut: int) -> PipelineShape:
    return PipelineShape(schedule, num_microbatches, cut, rank=0)


def test_stages_are_their_layers_and_what_is_around_them() -> None:
    stages = LOPSIDED.of_stages((1, 3))
    assert stages.forward_seconds == (4.25, 5.25)
    assert stages.backward_seconds == (8.5, 10.5)


def test_what_ranks_know_together() -> None:
    first = RankProfile({0: LayerCosts("0", 1.0, 2.0, 8)}, {0: 0.25}, {0: 0.5}, 1.0, 9.0)
    twin = RankProfile({0: LayerCosts("0", 3.0, 4.0, 8)}, {0: 0.75}, {0: 0.5}, 3.0, 9.0)
    last = RankProfile({1: LayerCosts("1", 5.0, 6.0)}, {1: 2.0}, {1: 0.25}, 1.0, 9.0)
    costs = StepCosts.of_ranks([first, last, twin])
    assert costs.layers == (LayerCosts("0", 2.0, 3.0, 8), LayerCosts("1", 5.0, 6.0))
    assert (costs.own_forward_seconds, costs.loss_forward_seconds) == (0.5, 1.5)
    assert (costs.own_backward_seconds, costs.loss_backward_seconds) == (0.5, 0.0)
    assert costs.update_seconds == 1.0


def test_a_layer_of_several_parts() -> None:
    parts = LayerCosts("embed", 1.0, 2.0, 8, 16, 4), LayerCosts("0", 3.0, 4.0, 9, 16, 4)
    assert LayerCosts.of_parts(parts) == LayerCosts("embed, 0", 4.0, 6.0, 9, 32, 8)


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("gpipe", 4), ("1f1b", 4)])
def test_a_synchronous_step_is_the_simulators(schedule: str, num_microbatches: int) -> None:
    flat = StepCosts((LayerCosts("0", 1.0, 2.0), LayerCosts("1", 1.0, 2.0)), update_seconds=0.5)
    taken = step_seconds(flat, shape(schedule, num_microbatches, 1, 1), (1, 1))
    assert taken == 3.0 * (num_microbatches + 2 - 1) + 0.5


@pytest.mark.parametrize(("schedule", "num_microbatches"), [("pipedream", 1), ("pipedream_2bw", 3)])
def test_an_asynchronous_step_is_the_slowest_ranks(schedule: str, num_microbatches: int) -> None:
    taken = step_seconds(LOPSIDED, shape(schedule, num_microbatches, 2, 2), (2, 2))
    assert taken == num_microbatches * (4.25 + 1.0 + 8.5 + 2.0) + 3.0


def test_the_better_cut_and_what_it_gains() -> None:
    balance = find_balance(LOPSIDED, shape("pipedream", 1, 3, 1))
    assert max(balance.stage_seconds(balance.better_cut)) == 15.75
    assert balance.gain == pytest.approx(1.0 - 18.75 / 21.75)


def test_a_cut_that_gains_nothing_stays() -> None:
    balance = find_balance(LOPSIDED, shape("pipedream", 1, 1, 3))
    assert balance.better_cut == balance.cut == (1, 3)
    assert balance.gain == 0.0


def test_stages_of_one_rank_are_balanced_together() -> None:
    times = [1.0] * 4 + [8.0] + [1.0] * 7
    costs = StepCosts(tuple(LayerCosts(str(i), t / 3, 2 * t / 3) for i, t in enumerate(times)))
    found = find_balance(costs, PipelineShape("zbv", 8, (3, 3, 3, 3), 0, stages_per_rank=2))
    assert found.better_cut == (4, 1, 2, 5)  # 10 and 9 on the ranks, in place of 6 and 13
    assert found.gain > 0.22


def test_it_can_be_read() -> None:
    text = str(find_balance(LOPSIDED, shape("pipedream", 1, 3, 1)))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "2 0 1 1000.00 ms 2000.00 ms 0 B 0 B" in lines
    assert "today 3, 1 18750.00 ms 14250.00 ms 21750.00 ms" in lines
    assert "better 1, 3 15750.00 ms 14250.00 ms 18750.00 ms" in lines


def test_costs_of_other_layers() -> None:
    with pytest.raises(ValueError, match=r"4 layers.*\[2, 3\] is one of 5"):
        find_balance(LOPSIDED, shape("gpipe", 1, 2, 3))


def test_no_time_at_all() -> None:
    idle = StepCosts((LayerCosts("0", 0.0, 0.0), LayerCosts("1", 0.0, 0.0)))
    assert isinstance(find_balance(idle, shape("gpipe", 1, 1, 1)), Balance)
    assert find_balance(idle, shape("gpipe", 1, 1, 1)).gain == 0.0
