"""The recipe's GPT under MeshStrategy equals a single device's, for each mesh of few ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import pytest

from tests.helpers.gpt_parity import BATCH_SIZE, Fitted, check_equal, fit
from tests.helpers.networks.chosen import chosen
from tests.helpers.processes.workers import WorkerPool
from tests.integration.mesh.cases import CASES, TENSOR_DIALS, name_of


def fit_each(names: Sequence[str]) -> dict[str, Fitted]:
    return {name: CASES[name].fit() for name in names}


@cache
def single_device(num_samples: int, accumulate: int) -> Fitted:
    return fit(1, "auto", num_samples, accumulate_grad_batches=accumulate)


@pytest.fixture(scope="module")
def fitted(request: pytest.FixtureRequest, workers: WorkerPool) -> Callable[[str], list[Fitted]]:
    """Gives what each rank has of a case; a mesh's cases run in one go.

    Where DTensor puts each operation's result it finds out once per mesh, and for models of this
    size that takes longer than to train them.
    """

    @cache
    def on_mesh(mesh: str) -> list[dict[str, Fitted]]:
        names = set(chosen(request.session, "fitted", "name", request.path))
        cases = {
            name: case
            for name, case in CASES.items()
            if name in names and name_of(case.sizes) == mesh
        }
        (devices,) = {case.devices for case in cases.values()}
        return workers.run(devices, fit_each, list(cases), timeout=60.0 * len(cases))

    return lambda name: [rank[name] for rank in on_mesh(name_of(CASES[name].sizes))]


# The conformance tests have the other products of two axes, under one schedule.
@pytest.mark.some(
    "2 stages x 2 shards x 2 tensor ranks, both",
    "2 stages x 2 shards, zb_h1, accumulated",
    "2 stages x 2 shards, zbv, recomputed and gathered again",
    "2 tensor ranks, both",
)
@pytest.mark.parametrize("name", CASES)
def test_equals_a_single_device(
    fitted: Callable[[str], list[Fitted]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    case = CASES[name]
    single = single_device(case.num_samples, case.accumulate)
    ranks = fitted(name)
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
