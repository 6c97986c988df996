"""Models of transformers, sharded by the plan that is found, give what they give alone.

Transformers is no dependency of the package, only of its tests.
"""

from __future__ import annotations

import re
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from lightning_dist.engine.tensor_parallel.summary import find_replicated
from tests.helpers.networks.hugging_face import MODELS, build, loss_of
from tests.helpers.processes.workers import WorkerPool
from tests.helpers.spread_parity import largest_difference

TOLERANCE = 1e-9

# A norm over all heads, a fused weight with grouped heads, a bias for each head.
WHOLE_ATTENTION = ("Olmo2ForCausalLM", "Phi3ForCausalLM", "T5ForConditionalGeneration")
REFUSED = dict.fromkeys(WHOLE_ATTENTION, "is not sharded and may look at all of it")
REFUSED["OPTForCausalLM"] = "a OPTDecoderLayer, which computes something else with a part of it"


def _compare(name: str, sequence_parallel: bool) -> float | str:
    tokens = torch.randint(96, (3, 12), generator=torch.Generator().manual_seed(2))
    tokens[0, -2:] = 0  # padding
    model = build(name)
    try:
        return largest_difference(
            model,
            find_plan(model).styles,
            lambda net: loss_of(net, tokens),
            sequence_parallel=sequence_parallel,
        )
    except ValueError as error:
        return str(error)


def case_all(names: list[str], sequence_parallel: bool) -> dict[str, float | str]:
    dist.init_process_group("gloo")
    # Some norms compute in float32, whatever the model's dtype.
    double = patch.object(torch.Tensor, "float", torch.Tensor.double)
    with double, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        return {name: _compare(name, sequence_parallel) for name in names}


# Grouped heads, a fused weight, attention that stays whole in an encoder and a decoder.
TELLING = ["LlamaForCausalLM", "FalconForCausalLM", "T5ForConditionalGeneration"]


@pytest.mark.some("telling")
@pytest.mark.parametrize("names", [TELLING, list(MODELS)], ids=["telling", "all"])
def test_a_spread_model_learns_what_it_learns_alone(workers: WorkerPool, names: list[str]) -> None:
    differences = workers.run(2, case_all, names, False, timeout=110)[0]
    assert len(differences) == len(names)
    assert {n: d for n, d in differences.items() if isinstance(d, str) or d > TOLERANCE} == {}


@pytest.mark.long
def test_with_a_cut_sequence_it_learns_the_same_or_says_why_not(workers: WorkerPool) -> None:
    differences = workers.run(2, case_all, list(MODELS), True, timeout=110)[0]
    refused = {name: why for name, why in differences.items() if isinstance(why, str)}
    assert max(d for d in differences.values() if not isinstance(d, str)) < TOLERANCE
    assert refused.keys() == REFUSED.keys()
    for name, why in refused.items():
        assert REFUSED[name] in why


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_leaves_out_what_would_be_wrong_with_some_heads(name: str) -> None:
    model = build(name)
    found = find_plan(model)
    left_out = [
        n for part in find_replicated(model, found.styles, found.reasons) for n in part.patterns
    ]
    is_whole = any(re.search(r"(ttention|self_attn)\.(\w+_proj|q|k|v|o)$", n) for n in left_out)
    assert is_whole == (name in WHOLE_ATTENTION)
