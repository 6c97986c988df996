"""Attentions as people write them, sharded by the plan that is found, give what they give alone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from tests.helpers.networks.attentions import ATTENTIONS, GPT, LENGTH, VOCABULARY
from tests.helpers.processes.workers import WorkerPool
from tests.helpers.spread_parity import largest_difference

TOLERANCE = 1e-12


def case_all(sequence_parallel: bool) -> dict[str, float]:
    dist.init_process_group("gloo")
    return {name: _compare(name, sequence_parallel) for name in ATTENTIONS}


def _compare(name: str, sequence_parallel: bool) -> float:
    torch.manual_seed(0)
    model = GPT(ATTENTIONS[name]).double()
    tokens = torch.randint(VOCABULARY, (3, LENGTH))
    styles = find_plan(model, 2).styles
    assert any(".attn." in sharded for sharded in styles)
    return largest_difference(
        model, styles, lambda net: net(tokens), sequence_parallel=sequence_parallel
    )


@pytest.mark.long
def test_each_attention_learns_what_it_learns_alone(workers: WorkerPool) -> None:
    for differences in workers.run(2, case_all, False):
        assert {n: d for n, d in differences.items() if d > TOLERANCE} == {}


def test_with_a_cut_sequence_each_learns_the_same(workers: WorkerPool) -> None:
    for differences in workers.run(2, case_all, True):
        assert {n: d for n, d in differences.items() if d > TOLERANCE} == {}
