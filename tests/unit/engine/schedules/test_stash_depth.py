"""The versions that a schedule says there are, and those that are alive when it runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.connect import connect_in_memory
from lightning_dist.engine.pipeline.gradients import HeldGradients
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stage import Stage
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.stash_depth import num_copies
from lightning_dist.engine.stashing.half_versions import HalfWeights
from lightning_dist.engine.stashing.prediction import extrapolated
from lightning_dist.engine.stashing.versions import Stashed, WeightVersion
from tests.helpers.processes.threads import run_ranks, shapes_of

WIDTH = 8


def copies_of(schedule: str, count: int, num_stages: int, versions: str, **options: Any) -> Any:
    shape = shapes_of(schedule, count, (1,) * num_stages, num_stages)[0]
    return list(num_copies(shape, versions, **options))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_the_closed_forms(n: int) -> None:
    assert copies_of("pipedream", 1, n, "stash") == [n - 1 - s for s in range(n)]
    assert copies_of("pipedream", 1, n, "vertical_sync") == n * [n - 1]
    assert copies_of("pipedream", 1, n, "none") == n * [0]
    predicted = [n - s for s in range(n - 1)] + [0]
    assert copies_of("pipedream", 1, n, "stash", predicts=True) == predicted
    for count in (max(1, n - 1), n, 2 * n):
        assert copies_of("pipedream_2bw", count, n, "stash") == (n - 1) * [1] + [0]
        late = copies_of("pipedream_2bw", count, n, "stash", predicts=True)
        assert late == (n - 1) * [2] + [1]
        assert copies_of("1f1b", count, n, "stash") == n * [0]


def watch(stage: Stage) -> Callable[[], int]:
    """Counts the memory of weights that is alive beside the stage's parameter."""
    seen: list[weakref.ref[Tensor]] = []
    (name, parameter), *_ = stage.named_parameters().items()
    policy: Any = stage.policy
    method = "_newest" if isinstance(policy, Stashed) else "acquire"
    make = getattr(policy, method)

    def watched() -> WeightVersion:
        version = make()
        if version.aliases:
            seen.append(weakref.ref(version.aliases[name]))
        return version

    setattr(policy, method, watched)

    def count() -> int:
        alive = [ref() for ref in seen]
        places = {alias.data_ptr() for alias in alive if alias is not None}
        return len(places - {parameter.data_ptr()})

    return count


def train(model: nn.Sequential, pipeline: Pipeline) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (stage,) = pipeline.stages.values()
    count, most = watch(stage), 0

    def look(_: nn.Module, __: Any) -> None:
        nonlocal most
        most = max(most, count())

    def update() -> None:
        nonlocal most
        optimizer.zero_grad()
        pipeline.install_gradients()
        with pipeline.updating():
            optimizer.step()
            most = max(most, count())

    for layer in model:
        layer.register_forward_pre_hook(look)
    for _ in range(9):
        batch = torch.ones(6, WIDTH)
        pipeline.train_batch(batch, lambda m: model(m.content).float().square().mean())
        if pipeline.has_gradients:
            update()
    for _ in pipeline.drain():
        update()
    return most, pipeline.stages.peak_stash_bytes, pipeline.stages.version_bytes


HALF = {
    "half": HalfWeights(lambda _: torch.bfloat16),
    "gradients": lambda _: HeldGradients(torch.float32),
}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "1f1b": ("1f1b", 3, {}),
    "stash": ("pipedream", 1, {}),
    "vertical sync": ("pipedream", 1, {"weight_versions": "vertical_sync"}),
    "none": ("pipedream", 1, {"weight_versions": "none"}),
    "2bw, fewest": ("pipedream_2bw", 2, {}),
    "2bw": ("pipedream_2bw", 3, {}),
    "half": ("pipedream", 1, HALF),
    "half, 2bw": ("pipedream_2bw", 3, HALF),
}


class Cast(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def alive(schedule: str, count: int, options: dict[str, Any]) -> list[Any]:
    return run_ranks(
        lambda: nn.Sequential(*(Cast(WIDTH, WIDTH, bias=False) for _ in range(3))),
        shapes_of(schedule, count, (1, 1, 1), 3),
        train,
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_as_many_are_alive(name: str) -> None:
    schedule, count, options = CASES[name]
    expected = copies_of(schedule, count, 3, options.get("weight_versions", "stash"))
    present = "half" in name  # beside its master
    for stage, (most, stash, each) in enumerate(alive(schedule, count, options)):
        assert most == expected[stage] + present
        assert stash == {stage: expected[stage] * each}
        if expected[stage]:
            assert each == WIDTH * WIDTH * (2 if present else 4)


@pytest.mark.parametrize(("schedule", "count"), [("pipedream", 1), ("pipedream_2bw", 3)])
def test_as_many_are_alive_that_were_predicted(schedule: str, count: int) -> None:
    own: dict[int, Any] = {}

    def predict(parameters: Mapping[str, nn.Parameter], count: int) -> Mapping[str, Tensor]:
        (parameter,) = parameters.values()
        optimizer = own.setdefault(id(parameter), torch.optim.SGD([parameter], 0.1, momentum=0.9))
        return extrapolated(optimizer, parameters, count)

    expected = copies_of(schedule, count, 3, "stash", predicts=True)
    for stage, (most, stash, each) in enumerate(alive(schedule, count, {"predict": predict})):
        assert most == expected[stage]
        assert stash == {stage: expected[stage] * each}
        assert each == WIDTH * WIDTH * 4


@pytest.mark.parametrize("differentiates", [False, True])
def test_a_step_that_switches_gradients_holds_no_version(differentiates: bool) -> None:
    """Whether a version is held for a backward is not the user's to say."""

    def step(microbatch: Any) -> Tensor:
        with torch.set_grad_enabled(differentiates):
            return model(microbatch.content).square().mean()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    links = connect_in_memory(range(1))[0]
    pipeline = Pipeline(model, PipelineShape("pipedream", 1, (2,), 0), links)
    batch = torch.ones(6, WIDTH)
    for _ in range(2):
        with torch.no_grad():
            pipeline.evaluate_batch(batch, step, 1)
        pipeline.train_batch(batch, step)
        pipeline.install_gradients()
        with pipeline.updating():
            pass
    assert pipeline.stages.peak_stash_bytes == {0: 0}
    assert (model[0].weight.grad is not None) == differentiates
