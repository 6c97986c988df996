from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from lightning_dist.engine.planning.search.model_costs import ModelCosts, averaged
from tests.unit.engine.planning.search.models import measured, model


def test_a_micro_batch_between_and_beyond_the_measured_ones() -> None:
    costs = ModelCosts((measured(2), measured(4)))
    for asked, found in ((1, 2.0), (2, 2.0), (3, 3.0), (4, 4.0), (8, 8.0)):
        batch = costs.at(asked)
        layer = batch.step.layers[0]
        assert layer.forward_seconds == found
        assert layer.activation_bytes == 10 * found
        assert layer.parameter_bytes == 100
        assert batch.rest_bytes == 6 * found
        assert batch.step.update_seconds == 4.0


def test_tensor_parallel_ranks_share_what_is_sharded() -> None:
    layer = model(tensor=True).at(10, tp=2).step.layers[0]
    assert (layer.forward_seconds, layer.backward_seconds) == (7.5, 15.0)
    assert layer.parameter_bytes == 75


@pytest.mark.parametrize(("count", "whole"), [(0, 40), (1, 80), (2, 100)])
def test_tensor_parallel_ranks_hold_whole_activations_where_they_meet(
    count: int, whole: int
) -> None:
    costs = model(tensor=True)
    tensor = replace(costs.tensor[2], meetings=(count,) * 4)
    layer = replace(costs, tensor={2: tensor}).at(10, tp=2).step.layers[0]
    assert layer.activation_bytes == whole + round(0.75 * (100 - whole))


def test_recomputed_layers_keep_inputs_and_run_twice() -> None:
    layer = model().at(1, recomputes=True).step.layers[0]
    assert (layer.forward_seconds, layer.backward_seconds) == (1.0, 3.0)
    assert layer.activation_bytes == 4


def test_sizes_that_do_not_rise() -> None:
    with pytest.raises(ValueError, match=r"\[4, 1\] must rise"):
        ModelCosts((measured(4), measured(1)))
    with pytest.raises(ValueError, match=r"same layers, not \[3, 4\]"):
        ModelCosts((measured(1, 3), measured(4, 4)))


def test_ranks_wait_for_the_slowest_in_each_layer_unless_they_take_turns() -> None:
    ranks = [model(seed=1), model(seed=2)]
    found = averaged(ranks)
    mean = slowest = 0.0
    for batch, *same in zip(found.batches, *(costs.batches for costs in ranks), strict=True):
        for index, layer in enumerate(batch.step.layers):
            both = [each.step.layers[index] for each in same]
            assert layer.forward_seconds == fmean(each.forward_seconds for each in both)
            assert layer.backward_seconds == fmean(each.backward_seconds for each in both)
            assert layer.parameter_bytes == both[0].parameter_bytes
            mean += layer.seconds
            slowest += max(each.seconds for each in both)
    assert found.waiting == pytest.approx(slowest / mean)
    assert found.waiting > 1.1
    alone, together = (found.at(1, num_microbatches=count).step for count in (1, 2))
    for one, other in zip(alone.layers, together.layers, strict=True):
        assert other == replace(
            one,
            forward_seconds=found.waiting * one.forward_seconds,
            backward_seconds=found.waiting * one.backward_seconds,
        )
    assert together.compute_seconds == pytest.approx(found.waiting * alone.compute_seconds)
    assert alone.layers == found.batches[0].step.layers
    assert together.update_seconds == pytest.approx(4.0 * found.waiting)


def test_stages_add_the_gradients_of_all_micro_batches_but_the_first() -> None:
    costs = ModelCosts((measured(1),), adding_seconds=0.5)
    (plain, *_), bytes_of_it = costs.at(1).step.layers, 100
    for count, share in ((1, 0.0), (2, 0.5), (4, 0.75)):
        layer, *_ = costs.at(1, num_microbatches=count).step.layers
        assert layer.backward_seconds == plain.backward_seconds + share * 0.5 * bytes_of_it
        assert layer.forward_seconds == plain.forward_seconds
    sharded = model(tensor=True)
    both = [replace(sharded, adding_seconds=rate).at(1, 2, num_microbatches=2) for rate in (0.0, 1)]
    times = [batch.step.layers[0].backward_seconds for batch in both]
    assert times[1] - times[0] == 0.5 * 75
    rates = [replace(costs, adding_seconds=rate) for rate in (1.0, 2.0)]
    assert averaged(rates).adding_seconds == 1.5
