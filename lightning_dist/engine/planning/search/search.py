"""Search all layouts of a model on a machine for the fastest that fits.

Each layout has a bound that no partition and no schedule can beat, and that costs nearly nothing.
Layouts are estimated in the order of their bounds, until the next bound is behind the last plan
that is wanted. So the result is that of an exhaustive search (a branch and bound).

Layouts are compared by the time of a sample. With a given global batch that is the order of their
steps. With a given batch of a data replica, layouts with more replicas have larger global batches.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nsmallest
from itertools import product

from lightning_dist.engine.common.mesh_shape import MeshShape, divisors
from lightning_dist.engine.common.names import check_count
from lightning_dist.engine.common.table import format_bytes
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.search.estimate import Estimator
from lightning_dist.engine.planning.search.layout import Estimate, Layout
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.model_costs import ModelCosts
from lightning_dist.engine.planning.search.plan import Plan, Ranking
from lightning_dist.engine.schedules.orders import SYNCHRONOUS
from lightning_dist.engine.schedules.registry import find_family

_MOST_STAGES_PER_RANK = 4
_UNFITTING_SHOWN, _UNFITTING_TRIED = 2, 50


@dataclass(frozen=True, slots=True)
class Request:
    """What layouts are allowed.

    Attributes:
        global_batch: Samples of an update; None if each data replica has a given batch instead.
        batch_size: Samples of each data replica's batch; None if the global batch is given.
        schedules: Schedules of stages.
        recompute: Whether activations may be computed again.
        replicas: Number of data replicas; None for any.
        num_plans: Number of plans that are wanted.

    Raises:
        ValueError: Neither batch is given, or both are; or a schedule is unknown or asynchronous.
    """

    global_batch: int | None = None
    batch_size: int | None = None
    schedules: tuple[str, ...] = tuple(family.name for family in SYNCHRONOUS)
    recompute: bool = True
    replicas: int | None = None
    num_plans: int = 10

    def __post_init__(self) -> None:
        """Checks the request."""
        if (self.global_batch is None) == (self.batch_size is None):
            raise ValueError(
                f"global_batch={self.global_batch}, batch_size={self.batch_size}: give one of them."
            )
        check_count("num_plans", self.num_plans)
        for name in ("global_batch", "batch_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in self.schedules:
            if find_family(name).update_rule.is_asynchronous:
                raise ValueError(
                    f"schedule={name!r} trains with stale weights, so its time says nothing beside"
                    " that of other schedules. Leave it out, and see docs/choosing.md."
                )


def schedule_names(schedules: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of schedules, which a configuration may give as a single string."""
    return (schedules,) if isinstance(schedules, str) else tuple(schedules)


def search(costs: ModelCosts, machine: Machine, request: Request) -> Ranking:
    """Returns the best plans.

    Args:
        costs: Costs of the model.
        machine: The machine.
        request: The layouts that are allowed.

    Raises:
        ValueError: No layout has these sizes, or none fits into the memory; then the message says
            by how many bytes, and what would fit.
    """
    estimator = Estimator(costs, machine)
    layouts = list(all_layouts(costs, machine, request))
    if not layouts:
        wanted = [
            f"has replicas={request.replicas}" if request.replicas else "",
            f"divides global_batch={request.global_batch}" if request.global_batch else "",
        ]
        raise ValueError(
            f"No mesh of {machine.world_size} ranks {' and '.join(filter(None, wanted))}: the data"
            " replicas divide the ranks, and share the samples out. Use a multiple of"
            f" {machine.world_size} samples, and a divisor of {machine.world_size} replicas."
        )
    bounds = [
        (estimator.least_seconds(layout) / layout.global_batch, index)
        for index, layout in enumerate(layouts)
    ]
    best: list[tuple[float, int, Plan]] = []
    tight: list[Layout] = []
    for bound, index in sorted(bounds):
        if len(best) == request.num_plans and bound >= best[-1][0]:
            break
        layout, fitting = layouts[index], None
        if estimator.least_bytes(layout) <= machine.memory_bytes:
            fitting = estimator.fitting(layout)
        if fitting is None:
            tight.append(layout)
            continue
        plan = Plan(fitting, estimator.estimate(fitting))
        insort(best, (plan.seconds_per_sample, index, plan), key=lambda found: found[:2])
        del best[request.num_plans :]
    if not best:
        raise ValueError(_too_large(estimator, tight))
    cut = [estimator.with_partition(layout) for layout in tight[:_UNFITTING_TRIED]]
    near = [Plan(layout, estimator.estimate(layout)) for layout in cut]
    others = nsmallest(_UNFITTING_SHOWN, near, lambda plan: plan.seconds_per_sample)
    plans = tuple(plan for _, _, plan in best)
    return with_reasons(Ranking(plans, len(layouts), tuple(others)), machine)


def with_reasons(ranking: Ranking, machine: Machine) -> Ranking:
    """Returns a ranking that says why plans lose, without slower ones that do not fit."""
    best = ranking.best
    faster = [p for p in ranking.unfitting if p.seconds_per_sample < best.seconds_per_sample]

    def losing(plan: Plan) -> Plan:
        return replace(plan, reason=why(plan, best, machine))

    plans = best, *map(losing, ranking.plans[1:])
    return replace(ranking, plans=plans, unfitting=tuple(map(losing, faster)))


# --- what there is -------------------------------------------------------------------------------


def all_layouts(costs: ModelCosts, machine: Machine, request: Request) -> Iterator[Layout]:
    """Yields all layouts without their partitions."""
    again = (False, True) if request.recompute else (False,)
    for mesh in _meshes(costs, machine):
        size, rest = (request.batch_size, 0)
        if request.global_batch is not None:
            size, rest = divmod(request.global_batch, mesh.data_size)
        if rest or not size or request.replicas not in (None, mesh.data_size):
            continue
        for recomputes in again:
            whole = Layout(mesh, size, recomputes=recomputes, layers=costs.layers)
            if mesh.pp == 1:
                yield whole
            else:
                yield from _staged(whole, costs, request.schedules)


def _meshes(costs: ModelCosts, machine: Machine) -> Iterator[MeshShape]:
    world = machine.world_size
    for tp, pp in product([1, *costs.tensor], divisors(world)):
        data, rest = divmod(world, tp * pp)
        most = costs.num_layers if costs.can_cut else 1
        if rest or not data or pp > most or tp > machine.ranks_per_host:
            continue
        for shard in divisors(data):
            yield MeshShape(pp, data // shard, shard, tp)


def _staged(whole: Layout, costs: ModelCosts, schedules: Sequence[str]) -> Iterator[Layout]:
    pp = whole.mesh.pp
    for name in schedules:
        family = find_family(name)
        most = family.most_stages or _MOST_STAGES_PER_RANK
        for per_rank in range(family.fewest_stages, most + 1):
            # A parameter of two stages of one rank would be sharded twice.
            if pp * per_rank > costs.num_layers or (costs.is_tied and per_rank > 1):
                continue
            for count in [1] if costs.whole_batches else divisors(whole.batch_size):
                if family.microbatch_rule.fits(pp, count):
                    yield replace(
                        whole, schedule=name, stages_per_rank=per_rank, num_microbatches=count
                    )


# --- why not -------------------------------------------------------------------------------------


def why(plan: Plan, best: Plan, machine: Machine) -> str:
    """Returns why a plan is not the best, in a few words."""
    excess = plan.estimate.memory.peak - machine.memory_bytes
    if excess > 0:
        return f"does not fit by {format_bytes(round(excess))}"
    own, theirs = (_parts(p.estimate, p.layout.global_batch) for p in (plan, best))
    lost = {name: own[name] - theirs.get(name, 0.0) for name in own}
    name = max(lost, key=lambda part: lost[part])
    estimate = plan.estimate
    if lost[name] <= 0:
        return "as fast"
    if name == "bubble":
        return f"bubble {estimate.bubble_seconds / estimate.step_seconds:.0%}"
    if name != "compute":
        wait = estimate.waits[name]
        return f"{name} of {format_bytes(round(wait.num_bytes))} wait {wait.seconds * 1e3:.3g} ms"
    more = f"{lost[name] / theirs['compute']:.0%} more compute"
    if plan.layout.recomputes and not best.layout.recomputes:
        return f"{more}: activations again"
    if plan.layout.microbatch_size < best.layout.microbatch_size:
        return f"{more}: micro-batches of {plan.layout.microbatch_size:g} samples"
    return f"{more} on the slowest stage" if plan.layout.mesh.pp > 1 else more


def _parts(estimate: Estimate, samples: int) -> dict[str, float]:
    parts = {"compute": estimate.compute_seconds, "bubble": estimate.bubble_seconds}
    parts |= {name: wait.seconds for name, wait in estimate.waits.items()}
    return {name: seconds / samples for name, seconds in parts.items()}


def _too_large(estimator: Estimator, tight: Sequence[Layout]) -> str:
    """Returns the message that no layout fits, from the one that lacks least."""
    least: tuple[Layout, RankMemory] | None = None
    for layout in sorted(tight, key=estimator.least_bytes):
        if least is not None and estimator.least_bytes(layout) >= least[1].peak:
            break
        cut = estimator.with_partition(layout)
        memory = estimator.memory(cut)
        if least is None or memory.peak < least[1].peak:
            least = (cut, memory)
    assert least is not None
    smallest, memory = least
    machine, held = estimator.machine, memory.peak - memory.activations
    free = int(machine.memory_bytes) - memory.activations
    more = (
        "a smaller batch"
        if memory.activations > held or free <= 0
        else f"{-(-machine.world_size * held // free):,} ranks or more"
    )
    return (
        f"No layout of {machine.world_size} ranks fits into"
        f" {format_bytes(round(machine.memory_bytes))} a rank. The smallest, {smallest}, lacks"
        f" {format_bytes(round(memory.peak - machine.memory_bytes))}: its fullest rank holds"
        f" {format_bytes(memory.peak)}, of which {format_bytes(memory.activations)} are"
        f" activations. It would fit with {format_bytes(memory.peak)} a rank; or try {more}."
    )
