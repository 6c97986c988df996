"""The rules' facts, and that an asynchronous schedule is one class: nothing else has to know it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.asynchronous import DoubleBufferedUpdate, PerBackwardUpdate
from lightning_dist.engine.schedules.family import ScheduleFamily
from lightning_dist.engine.schedules.registry import FAMILIES, PipelineShape
from lightning_dist.engine.schedules.rounds import Stream
from lightning_dist.engine.schedules.schedule import lower
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.engine.schedules.stash_depth import num_copies
from lightning_dist.engine.schedules.update_rule import (
    BackwardWeights,
    FlushedUpdate,
    StageWeights,
    UpdateRule,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.split import find_split
from tests.helpers.oracle import train_late
from tests.helpers.processes.threads import run_ranks, shapes_of, train_with
from tests.helpers.update_rules import PER_BATCH, TRIPLE, add_families

ASYNCHRONOUS = [*(f for f in FAMILIES.values() if f.update_rule.is_asynchronous), TRIPLE, PER_BATCH]
PARTITION = (2, 1, 2)
RULES = [FlushedUpdate(), *(family.update_rule for family in ASYNCHRONOUS)]


@pytest.fixture(autouse=True)
def _families(monkeypatch: pytest.MonkeyPatch) -> None:
    add_families(monkeypatch)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_delays_are_those_of_the_papers(n: int) -> None:
    def delays(rule: UpdateRule) -> list[int]:
        return [rule.delay(rank, n, 1) for rank in range(n)]

    assert delays(FlushedUpdate()) == n * [0]
    assert delays(PerBackwardUpdate()) == list(reversed(range(n)))
    assert delays(DoubleBufferedUpdate()) == n * [1]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_joint_updates_have_the_same_delay_on_all_stages(rule: UpdateRule) -> None:
    assert rule.is_joint == (len({rule.delay(rank, 3, 1) for rank in range(3)}) == 1)
    assert rule.is_asynchronous == (rule.lag(3, 1) > 0)


@pytest.mark.parametrize("rank", range(4))
def test_under_vertical_sync_each_stage_is_as_stale_as_the_first(rank: int) -> None:
    for rule in (PerBackwardUpdate(), DoubleBufferedUpdate()):
        weights = rule.weights("vertical_sync", rank, 4, 3)
        assert weights.of_backward is BackwardWeights.STASHED
        assert weights.age + rule.delay(rank, 4, 3) == rule.lag(4, 3)
        assert rule.weights("stash", rank, 4, 3) == StageWeights(BackwardWeights.STASHED)
        assert rule.weights("none", rank, 4, 3).of_backward is BackwardWeights.NEWEST
    assert FlushedUpdate().weights("none", rank, 4, 3) == StageWeights(BackwardWeights.UNCHANGED)


@pytest.mark.parametrize("family", ASYNCHRONOUS, ids=lambda family: family.name)
@given(n=st.integers(1, 8), extra=st.integers(0, 3), batches=st.integers(1, 12), data=st.data())
@settings(max_examples=60)
def test_rounds_and_drain_are_the_whole_schedule(
    family: ScheduleFamily, n: int, extra: int, batches: int, data: st.DataObject
) -> None:
    rule, rank = family.update_rule, data.draw(st.integers(0, n - 1))
    fewest = next(m for m in range(1, 9) if family.microbatch_rule.fits(n, m))
    m = fewest + extra if rule.splits_batches else 1
    homes = family.rank_of_stage(n)
    whole = lower(family.build(homes, m, batches)).validate()
    stream = Stream(family, homes, num_microbatches=m, rank=rank)
    rounds = [stream.round(k) for k in range(batches)]
    drain = stream.drain(batches)
    assert tuple(a for part in (*rounds, *drain) for a in part) == whole.ranks[rank]
    assert len(drain) == min(batches, stream.delay)
    assert all(part[-1].kind is ActionKind.STEP for part in drain)
    for k, part in enumerate(rounds):
        steps = [a for a in part if a.kind is ActionKind.STEP]
        assert [a.microbatch_index for a in steps] == [k - stream.delay] * (k >= stream.delay)
        if steps:
            reduction = replace(steps[0], kind=ActionKind.REDUCE_GRAD)
            assert part[-1] == steps[0]
            assert rule.completes_early or part[-2] == reduction


@pytest.mark.parametrize("family", ASYNCHRONOUS, ids=lambda family: family.name)
def test_no_asynchronous_schedule_has_a_bubble(family: ScheduleFamily) -> None:
    m = 3 if family.update_rule.splits_batches else 1
    schedule = lower(family.build(family.rank_of_stage(4), m, 5))
    timeline = simulate(schedule, StageCosts.uniform(4, 1, 2))
    assert timeline.makespan_seconds == (m * 5 + 3) * 3


@pytest.mark.parametrize("family", [TRIPLE, PER_BATCH], ids=lambda family: family.name)
@pytest.mark.parametrize(("n", "m"), [(2, 1), (4, 2), (4, 3), (5, 2), (5, 7)])
def test_a_stage_keeps_a_version_per_batch_in_flight_behind_it(
    family: ScheduleFamily, n: int, m: int
) -> None:
    shape = PipelineShape(family.name, m, n * (1,), 0)
    assert num_copies(shape, "stash") == tuple(-(-(n - 1 - s) // m) for s in range(n))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "triple", "weight_versions": "none"}, "same version on all stages"),
        ({"schedule": "triple", "staleness_correction": "lr"}, "same on each"),
        ({"schedule": "triple", "num_microbatches": 2}, None),
        ({"schedule": "triple", "staleness_correction": "predict"}, None),
        ({"schedule": "per_batch", "weight_versions": "vertical_sync"}, None),
        ({"schedule": "per_batch", "staleness_correction": "lr", "num_microbatches": 3}, None),
    ],
)
def test_the_configuration_asks_the_rule(arguments: dict[str, Any], message: str | None) -> None:
    if message is None:
        config = PipelineConfig(**arguments)
        assert config.asynchronous
        assert config.training_microbatches(3) == arguments.get("num_microbatches", 3)
    else:
        with pytest.raises(ValueError, match=message):
            PipelineConfig(**arguments)


def test_rates_are_corrected_by_the_rule_s_delay() -> None:
    config = PipelineConfig(schedule="per_batch", staleness_correction="lr", num_microbatches=2)
    shapes = shapes_of("per_batch", 2, 6 * (1,), 6)
    found = [config.rate_correction(shape) for shape in shapes]
    assert [c.staleness for c in found if c is not None] == [3, 2, 2, 1, 1, 0]


def test_ties_need_stages_that_update_together() -> None:
    def tied() -> nn.Module:
        layers = make()
        layers[4].weight = layers[0].weight
        return nn.ModuleDict({"model": layers})

    config = PipelineConfig(schedule="triple", partition=[2, 3])
    assert find_split(tied(), config, 2, 0).ties
    with pytest.raises(ValueError, match="schedule='per_batch' the later stage"):
        find_split(tied(), PipelineConfig(schedule="per_batch", partition=[2, 3]), 2, 0)


def make() -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    return nn.Sequential(*layers).double()


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(2))  # type: ignore[misc]
        for _ in range(7)
    ]


def sizes_of(family: ScheduleFamily) -> list[int]:
    """Returns the numbers of micro-batches to try on as many ranks as :data:`PARTITION` has."""
    if not family.update_rule.splits_batches:
        return [1]
    return [m for m in (1, 2, 3) if family.microbatch_rule.fits(len(PARTITION), m)]


@pytest.mark.parametrize("versions", ["stash", "vertical_sync"])
@pytest.mark.parametrize(
    ("family", "m"),
    [pytest.param(f, m, id=f"{f.name}-{m}") for f in ASYNCHRONOUS for m in sizes_of(f)],
)
def test_each_rule_trains_as_its_delays_say(family: ScheduleFamily, m: int, versions: str) -> None:
    rule, n = family.update_rule, len(PARTITION)
    stage_of = [stage for stage, count in enumerate(PARTITION) for _ in range(count)]

    def staleness(name: str) -> int:
        if versions == "vertical_sync":
            return rule.lag(n, m)
        return rule.delay(stage_of[int(name.split(".")[0])], n, m)

    expected = make()
    train_late(
        expected,
        make_optimizer(expected.parameters()),
        batches(),
        loss,
        drains=(),
        staleness=staleness,
    )

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model(batch[0]), batch[1])

    peaks: list[tuple[dict[int, int], int]] = []

    def train(model: nn.Sequential, pipeline: Pipeline) -> dict[str, Tensor]:
        state: dict[str, Tensor] = train_with(make_optimizer, batches(), step)(model, pipeline)
        peaks.append((pipeline.stages.peak_stash_bytes, pipeline.stages.version_bytes))
        return state

    shapes = shapes_of(family.name, m, PARTITION, n)
    ranks = run_ranks(make, shapes, train, weight_versions=versions)
    state = {name: value for rank in ranks for name, value in rank.items()}
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)
    copies = num_copies(shapes[0], versions)  # type: ignore[arg-type]
    for stashes, version_bytes in peaks:
        ((stage, stash),) = stashes.items()
        assert stash == copies[stage] * version_bytes
