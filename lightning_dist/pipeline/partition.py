"""Cut a sequence of layers into contiguous stages with the smallest bottleneck.

A pipeline is as fast as its slowest stage, so the cut minimises the largest stage cost. The dynamic
programme over (layers, stages) finds the optimum; greedy and block rules do not (PipeDream,
section 3.1, uses the same recurrence).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


def partition_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    boundary_bytes: Sequence[float] | None = None,
    bandwidth_bytes_per_second: float | None = None,
) -> list[int]:
    """Finds an optimal contiguous partition.

    Args:
        costs: Of each layer, in seconds or any other unit.
        num_stages: Stages, each of at least one layer.
        boundary_bytes: Bytes of the activation behind each layer; sent forward, and its gradient
            back.
        bandwidth_bytes_per_second: Of the link between stages; the costs are seconds then.

    Returns:
        The number of layers of each stage.

    Raises:
        ValueError: More stages than layers, a negative cost, or a boundary without a bandwidth.
    """
    _check(costs, num_stages, boundary_bytes, bandwidth_bytes_per_second)
    num_layers = len(costs)
    sums = [0.0, *accumulate(float(cost) for cost in costs)]
    links = [0.0] * (num_layers + 1)
    if boundary_bytes is not None and bandwidth_bytes_per_second is not None:
        links[1:] = [2 * size / bandwidth_bytes_per_second for size in boundary_bytes]
    # best[j]: the bottleneck of the first j layers on the stages so far.
    best = [float("inf"), *sums[1:]]
    cuts: list[list[int]] = []
    for stage in range(2, num_stages + 1):
        best, cut = _add_stage(best, sums, links, stage)
        cuts.append(cut)
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    ends.append(0)
    return [end - start for end, start in pairwise(ends)][::-1]


def _add_stage(
    best: list[float], sums: list[float], links: list[float], stage: int
) -> tuple[list[float], list[int]]:
    """Extends the optimum of the first j layers by one stage.

    The bottleneck of the stages before grows with the cut, and the new stage's cost shrinks, so
    without boundary costs the best cut is where they cross.
    """
    num_layers = len(sums) - 1
    extended = [float("inf")] * (num_layers + 1)
    cut = [0] * (num_layers + 1)
    has_links = any(links)
    for j in range(stage, num_layers + 1):
        candidates: Sequence[int] = range(stage - 1, j)
        if not has_links:
            crossing = bisect_left(candidates, True, key=_crosses(best, sums, j))
            candidates = candidates[max(0, crossing - 1) : crossing + 1]
        for i in candidates:
            value = max(best[i], sums[j] - sums[i], links[i])
            if value < extended[j]:
                extended[j], cut[j] = value, i
    return extended, cut


def _crosses(best: list[float], sums: list[float], j: int) -> Callable[[int], bool]:
    return lambda i: best[i] >= sums[j] - sums[i]


def uniform_partition(num_layers: int, num_stages: int) -> list[int]:
    """Gives each stage the same number of layers, the earlier ones one more if need be.

    Args:
        num_layers: Layers.
        num_stages: Stages.

    Raises:
        ValueError: More stages than layers.
    """
    _check([0.0] * num_layers, num_stages, None, None)
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


def _check(
    costs: Sequence[float],
    num_stages: int,
    boundary_bytes: Sequence[float] | None,
    bandwidth_bytes_per_second: float | None,
) -> None:
    if not 1 <= num_stages <= len(costs):
        raise ValueError(
            f"num_stages={num_stages} must be between 1 and the number of layers ({len(costs)}):"
            " each stage needs one."
        )
    if any(not cost >= 0 for cost in costs):
        raise ValueError(f"The costs must not be negative, but are {list(costs)}.")
    if (boundary_bytes is None) != (bandwidth_bytes_per_second is None):
        raise ValueError("Give `boundary_bytes` and `bandwidth_bytes_per_second` together.")
    if boundary_bytes is not None and len(boundary_bytes) != len(costs):
        raise ValueError(
            f"boundary_bytes has {len(boundary_bytes)} entries for {len(costs)} layers; give the"
            " bytes behind each layer."
        )
