"""The partition of layers into contiguous stages with the smallest bottleneck.

A pipeline is as fast as its slowest stage. The dynamic programme over (layers, stages) finds the
optimum; greedy and block rules do not (PipeDream, section 3.1, uses the same recurrence). Its step
is ``best[j] = min over i of max(before[i], cost of the layers i..j)``, where ``before[i]`` is the
bottleneck of the first ``i`` layers on the stages before, and of the link behind them. The cost
falls with ``i``, but links and memory make ``before`` jump. If a later ``i`` has a ``before`` that
is no worse, the earlier ``i`` can be dropped. So the remaining values of ``before`` rise, and the
best ``i`` is where the two cross. They are a stack that grows with ``j``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True)
class Move:
    """A layer's move from one rank of the pipeline to another."""

    layer_index: int
    source: int
    target: int


def stage_of_layers(layers_per_stage: Sequence[int]) -> list[int]:
    """Returns the stage of each layer."""
    return [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]


def layers_of_stages(layers_per_stage: Sequence[int], stages: Collection[int]) -> list[int]:
    """Returns the indices of the layers of some stages."""
    return [i for i, stage in enumerate(stage_of_layers(layers_per_stage)) if stage in stages]


def find_moves(
    before: Sequence[int], after: Sequence[int], rank_of_stage: Sequence[int]
) -> tuple[Move, ...]:
    """Returns the moves of layers between two partitions on the same ranks, in order."""
    assert len(before) == len(after) == len(rank_of_stage)
    stages = zip(stage_of_layers(before), stage_of_layers(after), strict=True)
    ranks = [(rank_of_stage[old], rank_of_stage[new]) for old, new in stages]
    return tuple(Move(layer, *pair) for layer, pair in enumerate(ranks) if pair[0] != pair[1])


_INFINITY = float("inf")
_LEAST_GAIN = 1e-12  # of the square of all costs, beyond rounding


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory that stages need and may use.

    Attributes:
        cap_bytes: Limit of each stage.
        resident_bytes: Bytes that each layer always holds: parameters, gradients, optimizer state.
        flight_bytes: Bytes of each layer for each micro-batch in flight: activations.
        in_flight: Largest number of micro-batches in flight on each stage.
        copy_bytes: Bytes of each layer for each copy of its weights.
        num_copies: Largest number of copies of the weights on each stage.
    """

    cap_bytes: float
    resident_bytes: Sequence[float]
    flight_bytes: Sequence[float]
    in_flight: Sequence[int]
    copy_bytes: Sequence[float]
    num_copies: Sequence[int]

    def fits(self, layers_per_stage: Sequence[int]) -> bool:
        """Returns whether each stage of a partition is within the limit."""
        stages = stage_of_layers(layers_per_stage)
        of_layers = zip(self.resident_bytes, self.flight_bytes, self.copy_bytes, strict=True)
        held = [0.0] * len(layers_per_stage)
        for stage, (resident, flight, copied) in zip(stages, of_layers, strict=True):
            held[stage] += resident + self.in_flight[stage] * flight
            held[stage] += self.num_copies[stage] * copied
        return max(held) <= self.cap_bytes


def partition_layers(
    costs: Sequence[float],
    num_stages: int,
    *,
    boundary_bytes: Sequence[float] | None = None,
    bandwidth_bytes_per_second: float | None = None,
    memory: MemoryLimit | None = None,
) -> list[int]:
    """Returns an optimal contiguous partition.

    Args:
        costs: Cost of each layer, in seconds or any other unit.
        num_stages: Number of stages, each of at least one layer.
        boundary_bytes: Bytes of each layer's output, which is sent forward, and its gradient back.
        bandwidth_bytes_per_second: Bandwidth of the link between stages; if given, the costs must
            be in seconds.
        memory: Limit that no stage may exceed.

    Returns:
        The number of layers of each stage.

    Raises:
        ValueError: There are more stages than layers, a cost is negative or not finite, a boundary
            has no bandwidth, or no partition fits into the memory.
    """
    _check(costs, num_stages, boundary_bytes, bandwidth_bytes_per_second)
    num_layers = len(costs)
    sums = _sums(costs)
    links = [0.0] * (num_layers + 1)
    if boundary_bytes is not None and bandwidth_bytes_per_second is not None:
        links[1:] = [2 * size / bandwidth_bytes_per_second for size in boundary_bytes]
    first = _first_layers(memory, num_layers, num_stages)
    reach = 0  # layers that the stages so far can hold at most
    for own in first:
        reach = bisect_right(own, reach) - 1
    # best[j]: the bottleneck of the first j layers on the stages so far.
    best = [0.0] + [_INFINITY] * num_layers
    cuts: list[list[int]] = []
    for own in first if reach == num_layers else ():
        best, cut = _add_stage(best, sums, links, own)
        cuts.append(cut)
    if best[num_layers] == _INFINITY:
        assert memory is not None
        raise ValueError(
            f"No cut of {num_layers} layers into {num_stages} stages keeps each within"
            f" {memory.cap_bytes:,.0f} bytes: the layers hold {sum(memory.resident_bytes):,.0f}"
            f" bytes and {sum(memory.flight_bytes):,.0f} for each micro-batch in flight. Use more"
            " stages, smaller micro-batches or another schedule."
        )
    ends = [num_layers]
    for cut in reversed(cuts):
        ends.append(cut[ends[-1]])
    return [end - start for end, start in pairwise(ends)][::-1]


def even_out_ranks(
    costs: Sequence[float], layers_per_stage: Sequence[int], rank_of_stage: Sequence[int]
) -> list[int]:
    """Returns a partition whose ranks are more evenly busy, for ranks with several stages.

    Layers move over the border of two stages, one at a time, as long as that lowers the sum of the
    squares of the ranks' costs. So the result is no worse, and need not be the best.

    Args:
        costs: Cost of each layer.
        layers_per_stage: The partition to begin with.
        rank_of_stage: The rank of each stage.
    """
    ends, busy = [*accumulate(layers_per_stage)], [0.0] * (1 + max(rank_of_stage))
    for layer, stage in enumerate(stage_of_layers(layers_per_stage)):
        busy[rank_of_stage[stage]] += costs[layer]

    def crossing(stage: int, step: int) -> tuple[int, int, float]:
        """Returns the rank that loses a layer over the border behind a stage, the other, and it."""
        source, target = rank_of_stage[stage : stage + 2][::-step]
        return source, target, costs[ends[stage] - (step < 0)]

    def gain(stage: int, step: int) -> float:
        if not [0, *ends][stage] < ends[stage] + step < ends[stage + 1]:
            return 0.0  # a stage would have no layer
        source, target, cost = crossing(stage, step)
        return 0.0 if source == target else cost * (busy[source] - busy[target] - cost)

    moves = [(stage, step) for stage in range(len(ends) - 1) for step in (1, -1)]
    while moves:
        stage, step = max(moves, key=lambda move: gain(*move))
        if gain(stage, step) <= _LEAST_GAIN * sum(busy) ** 2:
            break
        source, target, cost = crossing(stage, step)
        busy[source] -= cost
        busy[target] += cost
        ends[stage] += step
    return [end - start for start, end in pairwise([0, *ends])]


def _add_stage(
    best: Sequence[float], sums: Sequence[float], links: Sequence[float], first: Sequence[int]
) -> tuple[list[float], list[int]]:
    """Extends the optimum ``best[j]`` of the first j layers by one stage, for each j."""
    before = [max(pair) for pair in zip(best, links, strict=True)]
    extended = [_INFINITY] * len(best)
    cut = [0] * len(best)
    starts: list[int] = []  # with rising values of `before`
    for j in range(1, len(best)):
        while starts and before[starts[-1]] >= before[j - 1]:
            starts.pop()
        starts.append(j - 1)
        fits = bisect_left(starts, first[j])
        crossing = bisect_left(starts, True, fits, key=_crosses(before, sums, j))
        for start in starts[max(fits, crossing - 1) : crossing + 1]:
            value = max(before[start], sums[j] - sums[start])
            if value < extended[j]:
                extended[j], cut[j] = value, start
    return extended, cut


def _crosses(before: Sequence[float], sums: Sequence[float], j: int) -> Callable[[int], bool]:
    return lambda start: before[start] >= sums[j] - sums[start]


def _first_layers(memory: MemoryLimit | None, num_layers: int, num_stages: int) -> list[list[int]]:
    """Returns the first layer at which a stage may begin so as to fit, by stage and end."""
    if memory is None:
        return [[0] * (num_layers + 1)] * num_stages
    of_layers = (memory.resident_bytes, memory.flight_bytes, memory.copy_bytes)
    of_stages = (memory.in_flight, memory.num_copies)
    if {*map(len, of_layers)} != {num_layers} or {*map(len, of_stages)} != {num_stages}:
        raise ValueError(
            f"The memory is that of {', '.join(str(len(b)) for b in of_layers)} layers on"
            f" {' and '.join(str(len(n)) for n in of_stages)} stages, but there are {num_layers}"
            f" layers and {num_stages} stages."
        )
    resident, flight, copied = map(_sums, of_layers)
    found = []
    for flights, copies in zip(*of_stages, strict=True):
        sums = [
            r + flights * f + copies * c for r, f, c in zip(resident, flight, copied, strict=True)
        ]
        found.append([bisect_left(sums, total - memory.cap_bytes) for total in sums])
    return found


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(float(value) for value in values)]


def uniform_partition(num_layers: int, num_stages: int) -> list[int]:
    """Returns the partition into equal stages; earlier ones get one more layer if need be.

    Raises:
        ValueError: There are more stages than layers.
    """
    _check_stages(num_layers, num_stages)
    share, rest = divmod(num_layers, num_stages)
    return [share + (stage < rest) for stage in range(num_stages)]


def _check_stages(num_layers: int, num_stages: int) -> None:
    if not 1 <= num_stages <= num_layers:
        raise ValueError(
            f"num_stages={num_stages} must be between 1 and the number of layers ({num_layers}):"
            " each stage needs one."
        )


def _check(
    costs: Sequence[float],
    num_stages: int,
    boundary_bytes: Sequence[float] | None,
    bandwidth_bytes_per_second: float | None,
) -> None:
    _check_stages(len(costs), num_stages)
    _check_finite("costs", costs)
    if (boundary_bytes is None) != (bandwidth_bytes_per_second is None):
        raise ValueError("Give `boundary_bytes` and `bandwidth_bytes_per_second` together.")
    if boundary_bytes is not None and len(boundary_bytes) != len(costs):
        raise ValueError(
            f"boundary_bytes has {len(boundary_bytes)} entries for {len(costs)} layers; give the"
            " bytes behind each layer."
        )
    if boundary_bytes is not None:
        _check_finite("boundary_bytes", boundary_bytes)
    if bandwidth_bytes_per_second is not None and not bandwidth_bytes_per_second > 0:
        raise ValueError(
            f"bandwidth_bytes_per_second={bandwidth_bytes_per_second} must be positive."
        )


def _check_finite(name: str, values: Sequence[float]) -> None:
    if not all(0 <= value < _INFINITY for value in values):
        raise ValueError(f"{name} must be finite and not negative, but are {list(values)}.")
