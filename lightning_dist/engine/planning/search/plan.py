"""Plans: layouts with their estimates, ranked, as a table and as YAML."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.common.names import check_count, check_positive
from lightning_dist.engine.common.table import Table, format_bytes
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.planning.search.layout import Estimate, Layout, Wait

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """A layout, what it is expected to cost, and why it is not the best.

    Attributes:
        layout: The layout.
        estimate: The expected cost of a step.
        reason: Why it lost, in a few words; empty for the best.
    """

    layout: Layout
    estimate: Estimate
    reason: str = ""

    @property
    def seconds_per_sample(self) -> float:
        """Time of a step for each of its samples."""
        return self.estimate.step_seconds / self.layout.global_batch

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as plain numbers, texts, lists and dictionaries."""
        layout, estimate = asdict(self.layout), asdict(self.estimate)
        layout["partition"] = list(self.layout.partition)
        layout["mesh"] = self.layout.mesh.sizes
        return {"layout": layout, "estimate": estimate, "reason": self.reason}

    @classmethod
    def from_dict(cls, content: Any) -> Plan:
        """Creates a plan from what :meth:`to_dict` returned.

        Raises:
            ValueError: The content is no plan.
        """
        try:
            layout, estimate = dict(content["layout"]), dict(content["estimate"])
            layout["mesh"] = MeshShape(**layout["mesh"])
            layout["partition"] = tuple(layout["partition"])
            estimate["waits"] = {name: Wait(**wait) for name, wait in estimate["waits"].items()}
            estimate["memory"] = RankMemory(**estimate["memory"])
            found = cls(Layout(**layout), Estimate(**estimate), str(content["reason"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(_no_plan(repr(error))) from None
        for name in ("batch_size", "stages_per_rank", "num_microbatches"):
            check_count(name, getattr(found.layout, name))
        for layers in found.layout.partition:
            check_count("partition", layers)
        return found

    def save(self, path: str | Path) -> None:
        """Writes the plan to a YAML file."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a YAML file.

        Raises:
            ValueError: The file holds no plan.
        """
        try:
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(_no_plan(f"{path}: {error}")) from None
        return cls.from_dict(content)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The best plans, the fastest first; as text, a table.

    Attributes:
        plans: The plans that fit.
        num_layouts: Number of layouts that the search has compared.
        unfitting: Faster layouts that do not fit, the fastest first.
        tried: Layouts of which steps ran; their plans' times are measured.
    """

    plans: tuple[Plan, ...]
    num_layouts: int
    unfitting: tuple[Plan, ...] = ()
    tried: tuple[Layout, ...] = ()

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]

    def __str__(self) -> str:
        """Draws the table, and one of the memory."""
        return f"{self.table()}\n\n{self.memory_table()}"

    def table(self, price: Price | None = None) -> Table:
        """Returns the table of times, and of costs if there is a price."""
        headings = ("plan", "batch", "step", "compute", "bubble", "exposed", "memory")
        rows = [
            _row(plan) + _costs(plan, price) + (plan.reason or "the best",)
            for plan in (*self.plans, *self.unfitting)
        ]
        costs = () if price is None else price.headings
        number = len(headings) + len(costs)
        title = f"The best {len(self.plans)} of {self.num_layouts:,} layouts"
        if self.tried:
            title += f", with steps of {len(self.tried)} tried"
        return Table(
            title, (*headings, *costs, "why not"), tuple(rows), frozenset(range(1, number))
        )

    def memory_table(self) -> Table:
        """Returns the table of the fullest rank's bytes, by category."""
        names = [f.name for f in fields(RankMemory)]
        kept = [n for n in names if any(getattr(p.estimate.memory, n) for p in self.plans)]
        rows = tuple(
            (str(p.layout), *(format_bytes(getattr(p.estimate.memory, name)) for name in kept))
            for p in self.plans
        )
        headings = ("plan", *(name.replace("_", " ") for name in kept))
        return Table(
            "Memory of the fullest rank", headings, rows, frozenset(range(1, len(headings)))
        )


@dataclass(frozen=True, slots=True)
class Price:
    """What time costs.

    Attributes:
        per_hour: Price of an hour of the whole machine.
        samples_per_epoch: Samples of an epoch; None if unknown.
        budget: Money to spend; None for no limit.

    Raises:
        ValueError: A number is not above zero.
    """

    per_hour: float
    samples_per_epoch: int | None = None
    budget: float | None = None

    def __post_init__(self) -> None:
        """Checks the numbers."""
        for name in ("per_hour", "samples_per_epoch", "budget"):
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)

    @property
    def headings(self) -> tuple[str, ...]:
        """Headings of the columns of costs."""
        epoch = "per epoch" if self.samples_per_epoch else "per 1,000 steps"
        return (epoch,) if self.budget is None else (epoch, "steps in budget")


def _no_plan(found: str) -> str:
    return (
        f"This is no plan: {found}. `Plan.save` and `python -m lightning_dist plan --out FILE`"
        " write one."
    )


def _row(plan: Plan) -> tuple[str, ...]:
    estimate = plan.estimate
    step = estimate.step_seconds
    return (
        str(plan.layout),
        str(plan.layout.global_batch),
        f"{step * 1e3:.4g} ms",
        f"{estimate.compute_seconds / step:.0%}",
        f"{estimate.bubble_seconds / step:.0%}",
        f"{estimate.exposed_seconds / step:.0%}",
        format_bytes(estimate.memory.peak),
    )


def _costs(plan: Plan, price: Price | None) -> tuple[str, ...]:
    if price is None:
        return ()
    step = price.per_hour * plan.estimate.step_seconds / _SECONDS_PER_HOUR
    steps = (price.samples_per_epoch or 1000 * plan.layout.global_batch) / plan.layout.global_batch
    bought = () if price.budget is None else (f"{price.budget / step:,.0f}",)
    return (f"{steps * step:,.2f}", *bought)
