"""The results of the study: means over seeds, each method at its best rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from recipes.staleness.clock import CLOCKED, Clocked, update_times
from recipes.staleness.network import Network, updates_until
from recipes.staleness.results import Results
from recipes.staleness.trial import Trial


@dataclass(frozen=True, slots=True)
class Curve:
    """Validation loss of a method on some stages, over seeds.

    Attributes:
        clocked: The method and its schedule.
        num_stages: Number of stages of the pipeline.
        rate_factor: The best of the tried factors, by the mean of the last losses.
        updates: Number of updates at each look.
        seconds: Time of each look, in batches of one device.
        losses: Losses in bits per byte, by seed and look.
    """

    clocked: Clocked
    num_stages: int
    rate_factor: float
    updates: tuple[int, ...]
    seconds: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> list[float]:
        """Mean losses over the seeds, by look."""
        return [sum(column) / len(column) for column in zip(*self.losses, strict=True)]

    @property
    def final(self) -> str:
        """The last loss: mean and half the distance of the extremes."""
        last = [of_seed[-1] for of_seed in self.losses]
        if math.isinf(self.means[-1]):
            return "diverged"
        if len(last) == 1:
            return f"{last[0]:.3f}"
        return f"{self.means[-1]:.3f} ± {(max(last) - min(last)) / 2:.3f}"

    @property
    def time(self) -> float:
        """Time of the whole training, as a share of one device's time."""
        return self.seconds[-1] / self.updates[-1]


def curves(
    results: Results,
    optimizer: str,
    stages: Sequence[int],
    rate_factors: Sequence[float],
    seeds: Sequence[int],
) -> Iterator[Curve]:
    """Yields the curves that have been trained with all seeds, each at its best rate.

    Args:
        results: All results.
        optimizer: Name of the optimizer.
        stages: Numbers of stages.
        rate_factors: Factors that were tried.
        seeds: Seeds that were tried.
    """
    for num_stages in stages:
        for clocked in CLOCKED:
            trained = clocked.method.trained_stages or num_stages
            found = []
            for factor in rate_factors:
                trials = [Trial(clocked.method, optimizer, trained, factor, s) for s in seeds]
                if all(trial in results for trial in trials):
                    found.append(_curve(results, clocked, num_stages, trials))
            if found:
                yield min(found, key=lambda curve: curve.means[-1])


def _curve(results: Results, clocked: Clocked, num_stages: int, trials: Sequence[Trial]) -> Curve:
    of_seeds = [results.curve(trial) for trial in trials]
    updates = max((tuple(look.num_updates for look in looks) for looks in of_seeds), key=len)
    times = update_times(clocked, num_stages, updates[-1])
    losses = [[look.bits_per_byte for look in looks] for looks in of_seeds]
    return Curve(
        clocked,
        num_stages,
        trials[0].rate_factor,
        updates,
        tuple(times[count - 1] for count in updates),
        tuple((*of_seed, *(math.inf,) * (len(updates) - len(of_seed))) for of_seed in losses),
    )


def network_table(
    found: Sequence[Curve], num_ranks: int, networks: Mapping[str, Network], target: float
) -> str:
    """Writes the seconds in which each way reaches a loss over each network, in Markdown.

    The least time of a network is bold.

    Args:
        found: Curves of one optimizer.
        num_ranks: Number of ranks of the curves to compare.
        networks: Networks by name.
        target: The loss to reach, in bits per byte.
    """
    own = [curve for curve in found if curve.num_stages == num_ranks]
    rows = {
        curve.clocked.name: [_seconds(curve, n, target) for n in networks.values()] for curve in own
    }
    least = [min(column) for column in zip(*rows.values(), strict=True)]
    lines = [f"| | bits per byte | {' | '.join(networks)} |", "|---" * (2 + len(networks)) + "|"]
    for curve in own:
        cells = []
        for seconds, best in zip(rows[curve.clocked.name], least, strict=True):
            shown = "never" if math.isinf(seconds) else f"{seconds:.2f} s"
            cells.append(f"**{shown}**" if seconds == best < math.inf else shown)
        lines.append(f"| {curve.clocked.name} | {curve.final} | {' | '.join(cells)} |")
    return "\n".join(lines)


def price(found: Sequence[Curve], num_ranks: int) -> str | None:
    """Returns a line with what stale weights cost; None if no method's loss shows it.

    Args:
        found: Curves of one optimizer.
        num_ranks: Number of stages.
    """
    own = {c.clocked.name: c.means[-1] for c in found if c.num_stages == num_ranks}
    sync, stale = own.get("sync, 1f1b"), own.get("pipedream")
    if sync is None or stale is None:
        return None
    return f"Stale weights cost {stale - sync:.3f} bits per byte (pipedream, {num_ranks} stages)."


def _seconds(curve: Curve, network: Network, target: float) -> float:
    count = updates_until(target, curve.updates, curve.means)
    if count is None:
        return math.inf
    times = update_times(curve.clocked, curve.num_stages, curve.updates[-1], network)
    return times[count - 1] * network.batch_seconds


def table(found: Sequence[Curve], stages: Sequence[int]) -> str:
    """Writes the last losses and the times of one optimizer in Markdown.

    Args:
        found: Curves of the optimizer.
        stages: Numbers of stages.
    """
    heads = [f"{n} ranks | time" for n in stages]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + 2 * len(stages)) + "|"]
    by_place = {(curve.clocked.name, curve.num_stages): curve for curve in found}
    for clocked in CLOCKED:
        cells = [_cell(by_place.get((clocked.name, n))) for n in stages]
        if any(cell != _cell(None) for cell in cells):
            lines.append(f"| {clocked.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(curve: Curve | None) -> str:
    if curve is None:
        return "- | -"
    rate = "" if curve.rate_factor == 1.0 else f" (rate x {curve.rate_factor:g})"
    return f"{curve.final}{rate} | {curve.time:.3f}"
