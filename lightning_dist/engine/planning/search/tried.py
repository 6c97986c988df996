"""Correct plans by what steps have taken, and choose the plans whose steps are worth trying.

Costs of layers and links predict a step within a fifth. What they miss, the plans of a mesh have in
common for the most part. So the best plan of each of some meshes is tried, and corrects the others
of its mesh. Then whichever plan may be the fastest by that is tried itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from lightning_dist.engine.planning.search.layout import Layout
from lightning_dist.engine.planning.search.machine import Machine
from lightning_dist.engine.planning.search.plan import Plan, Ranking
from lightning_dist.engine.planning.search.search import with_reasons

_MOST_MESHES, _MOST_PLANS = 4, 8
_NEAR = 1.15
"""Plans that are predicted to take so many times the fastest one's time may be as fast."""

Ratios = Mapping[Layout, float | None]
"""A step's measured time over the predicted one, by layout; None where the module cannot go."""


def next_to_try(ranking: Ranking, ratios: Ratios) -> Plan | None:
    """Returns the plan of which steps tell most, or None if enough is known."""
    meshes = {layout.mesh for layout in ratios}
    if len(meshes) < _MOST_MESHES:
        for plan in ranking.plans:
            if plan.layout.mesh not in meshes:
                return plan
    plans = _ordered(ranking.plans, ratios)
    if len(ratios) < _MOST_PLANS:
        for plan in plans:
            if plan.seconds_per_sample > _NEAR * plans[0].seconds_per_sample:
                break
            if plan.layout not in ratios:
                return next(same for same in ranking.plans if same.layout == plan.layout)
    return None


def corrected(ranking: Ranking, ratios: Ratios, machine: Machine) -> Ranking:
    """Returns a ranking by what steps have taken.

    Plans that were not tried take the median ratio of those of their mesh; where none was, of all.

    Raises:
        ValueError: The module cannot be put on any of the plans' meshes.
    """
    plans = tuple(_ordered(ranking.plans, ratios))
    if not plans:
        refused = dict.fromkeys(str(layout.mesh) for layout in ratios)
        raise ValueError(f"The module goes on none of {', '.join(refused)}.")
    others = tuple(_ordered(ranking.unfitting, ratios))
    tried = tuple(layout for layout, ratio in ratios.items() if ratio is not None)
    return with_reasons(Ranking(plans, ranking.num_layouts, others, tried), machine)


def _ordered(plans: Sequence[Plan], ratios: Ratios) -> list[Plan]:
    """Returns the plans that are possible with corrected estimates, the fastest first."""
    known = {layout: ratio for layout, ratio in ratios.items() if ratio is not None}
    meshes = {layout.mesh for layout in ratios}

    def ratio_of(layout: Layout) -> float | None:
        if layout in ratios:
            return ratios[layout]
        same = [ratio for tried, ratio in known.items() if tried.mesh == layout.mesh]
        if layout.mesh in meshes and not same:
            return None
        return median(same or known.values() or [1.0])

    found = []
    for plan in plans:
        ratio = ratio_of(plan.layout)
        if ratio is not None:
            found.append(replace(plan, estimate=plan.estimate.times(ratio), reason=""))
    return sorted(found, key=lambda plan: plan.seconds_per_sample)
