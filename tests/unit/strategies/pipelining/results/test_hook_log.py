"""What hooks of several stages log becomes one call for each name."""

from __future__ import annotations

import torch

from lightning_dist.strategies.pipelining.results.hook_log import HookCall, merge_calls


def call(hook: str, name: str, value: float, reduce_fx: str = "mean", number: int = 0) -> HookCall:
    return HookCall((hook, name, number), value, torch.float32, {"reduce_fx": reduce_fx})


def test_values_of_several_stages_are_reduced_and_others_become_known() -> None:
    first = [call("end", "sum", 1.0, "sum"), call("end", "rate", 0.5), call("step", "w0", 3.0)]
    last = [call("step", "w1", 4.0), call("end", "sum", 2.0, "sum"), call("end", "rate", 0.7)]
    found = [(c.key[0], c.key[1], round(c.value, 6)) for c in merge_calls([first, [], last])]
    assert found == [
        ("end", "sum", 3.0),
        ("end", "rate", 0.6),
        ("step", "w0", 3.0),
        ("step", "w1", 4.0),
    ]


def test_the_second_call_of_a_name_is_another() -> None:
    calls = [call("end", "max", 1.0, "max"), call("end", "max", 5.0, "max", number=1)]
    found = merge_calls([calls, [call("end", "max", 2.0, "max")]])
    assert [c.value for c in found] == [2.0, 5.0]
