"""Ordinary modules under each strategy at the first try: equal to one device, or told what to do.

``docs/first_hour.md`` has a table of what becomes of each. ``--all`` runs each cell of it, and
``python -m tests.integration.first_hour.table`` writes it anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch

from tests.helpers.processes.workers import WorkerPool
from tests.integration.first_hour.common import STRATEGIES, TOLERANCE, Seen, compare, train
from tests.integration.first_hour.modules import MODULES
from tests.integration.first_hour.table import outcome, read_table

STAGES = "PipelineStrategy()"
# Batch statistics, tied weights and a list of blocks, blocks of transformers, noise in the data.
CUT = ("MLP, BatchNorm", "nanoGPT", "GPT-2", "random data")


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], str]:
    return read_table()


@pytest.mark.some("VAE-*", "LSTM-PipelineStrategy()", "nanoGPT-PipelineStrategy()")
@pytest.mark.parametrize(("module", "strategy"), list(product(MODULES, STRATEGIES)))
def test_a_newcomers_module(
    workers: WorkerPool, table: dict[tuple[str, str], str], module: str, strategy: str
) -> None:
    assert outcome(workers, module, strategy) == table[module, strategy]


def test_stages_train_nearly_all_of_them(table: dict[tuple[str, str], str]) -> None:
    cells = [table[module, STAGES] for module in MODULES]
    assert sum(cell == "equal" for cell in cells) >= 13


@pytest.fixture(scope="module")
def replicas(workers: WorkerPool) -> list[Seen]:
    return workers.run(2, train, "VAE", "DDPStrategy()", {})


def put_nan(ranks: list[Seen]) -> None:
    ranks[1].end["vae.decoder2.bias"][0] = torch.nan


def move_one_copy(ranks: list[Seen]) -> None:
    ranks[1].end["vae.decoder2.bias"][0] += 1e-7


def move_all_copies(ranks: list[Seen]) -> None:
    for rank in ranks:
        rank.end["vae.decoder2.bias"][0] += 1e-7


def lose_a_batch(ranks: list[Seen]) -> None:
    for rank in ranks:
        rank.batches.pop()


def share_batches(ranks: list[Seen]) -> None:
    ranks[1].batches = ranks[0].batches


def share_the_seed(ranks: list[Seen]) -> None:
    ranks[1].built = ranks[0].built


@pytest.mark.parametrize(
    "break_",
    [put_nan, move_one_copy, move_all_copies, lose_a_batch, share_batches, share_the_seed],
)
def test_the_comparison_sees(replicas: list[Seen], break_: Callable[[list[Seen]], None]) -> None:
    ranks = copy.deepcopy(replicas)
    break_(ranks)
    with pytest.raises(AssertionError):
        assert compare("VAE", ranks) < TOLERANCE
