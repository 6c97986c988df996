"""The recipe's GPT under MeshStrategy equals a single device's, for each mesh of few ranks."""

from __future__ import annotations

from functools import cache

import pytest

from tests.helpers.gpt_parity import BATCH_SIZE, Fitted, check_equal, fit
from tests.helpers.workers import WorkerPool
from tests.integration.mesh.cases import CASES, TENSOR_DIALS, Case, name_of


def fit_on_mesh(case: Case) -> Fitted:
    return case.fit()


@cache
def single_device(num_samples: int, accumulate: int) -> Fitted:
    return fit(1, "auto", num_samples, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize("name", CASES)
def test_equals_a_single_device(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    case = CASES[name]
    single = single_device(case.num_samples, case.accumulate)
    ranks = workers.run(case.devices, fit_on_mesh, case, timeout=120.0)
    num_batches = -(-case.num_samples // BATCH_SIZE)
    check_equal(ranks, single, case.replicas, -(-num_batches // case.accumulate))


def test_no_product_of_axes_is_left_out() -> None:
    on_two = {"2 stages", "2 replicas", "2 shards", "2 tensor ranks"}
    pairs = {"2 stages x 2 replicas", "2 stages x 2 shards", "2 stages x 2 tensor ranks"}
    pairs |= {"2 replicas x 2 shards", "2 replicas x 2 tensor ranks", "2 shards x 2 tensor ranks"}
    on_four = {name.replace("2", "4") for name in on_two} | pairs
    meshes = {name_of(case.sizes) for case in CASES.values()}
    assert meshes >= on_two | on_four
    for mesh in on_two | on_four:
        dials = TENSOR_DIALS if "tensor" in mesh else ("", ", accumulated")
        assert all(any(name.startswith(f"{mesh}{dial}") for name in CASES) for dial in dials)
