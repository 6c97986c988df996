"""How cost grows with the number of ranks: ``python -m tests.benchmarks.scaling``.

Not a test: it prints tables. On paper for 2 to 64 ranks, from the schedules and the planners; and
for 2 to 16 real processes, whose layers sleep, so that few cores serve many ranks. Each row ends
with the curve that is nearest to it. A pipeline's model grows with its ranks, two layers to a
stage, and a batch has the same number of micro-batches on any number of ranks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from lightning_dist.engine.planning.balance import step_seconds
from lightning_dist.engine.planning.layer_costs import LayerCosts, StepCosts
from lightning_dist.engine.planning.partition import partition_layers
from lightning_dist.engine.profiling.bubble import predicted_timeline
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.rounds import Rounds
from lightning_dist.engine.schedules.schedule import lower
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.engine.schedules.stash_depth import num_copies
from tests.benchmarks.scaling import paper
from tests.benchmarks.scaling.growth import growth
from tests.benchmarks.scaling.layouts import LAYOUTS, MESH, Layout
from tests.benchmarks.scaling.processes import SIZES, RankCost, on_rank
from tests.helpers.processes.workers import WorkerPool

PAPER_SIZES = paper.Sizes(layer_bytes=64 << 20, row_bytes=1 << 20, rows=128)
NOISE = 0.15
"""Of times and of memory, as a part of them."""
MIB, KIB = 1 << 20, 1 << 10
Row = tuple[str, Sequence[float]]


def print_table(
    title: str, sizes: Sequence[int], rows: Sequence[Row], digits: int = 0, noise: float = 0.0
) -> None:
    table = Table(title=title)
    table.add_column("")
    for heading in (*map(str, sizes), "growth"):
        table.add_column(heading, justify="left" if heading == "growth" else "right")
    for name, values in rows:
        shown = [f"{value:,.{digits}f}" for value in values]
        table.add_row(name, *shown, growth(sizes, values, noise) if len(sizes) > 2 else "")
    Console(width=130).print(table)


# --- on paper ------------------------------------------------------------------------------------


def largest(count: Callable[..., int], layout: Layout, num_ranks: int, sizes: paper.Sizes) -> int:
    """Counts something of the rank that has most of it."""

    def of(rank: int) -> int:
        traffic = paper.traffic_of(layout, num_ranks, rank, sizes)
        return count(traffic, layout, num_ranks)

    return max(map(of, range(num_ranks)))


def print_paper(layouts: Sequence[Layout], sizes: Sequence[int]) -> None:
    given = PAPER_SIZES

    def rows(value: Callable[[Layout, int], float]) -> list[Row]:
        return [(layout.name, [value(layout, n) for n in sizes]) for layout in layouts]

    where = "of the rank that has most, on paper"
    print_table(
        f"Messages in a step, {where}",
        sizes,
        rows(lambda layout, n: largest(paper.num_messages, layout, n, given)),
    )
    print_table(
        f"MiB sent in a step, {where}",
        sizes,
        rows(lambda layout, n: largest(paper.num_bytes, layout, n, given) / MIB),
    )

    def memory(layout: Layout, num_ranks: int) -> float:
        ranks = range(num_ranks)
        return max(paper.memory_of(layout, num_ranks, rank, given) for rank in ranks) / MIB

    print_table(f"MiB of memory, {where}", sizes, rows(memory))


def seconds_of(run: Callable[[], Any]) -> float:
    """Measures the processor's time, the median of three runs."""

    def once() -> float:
        began = time.process_time()
        run()
        return time.process_time() - began

    return median(once() for _ in range(3))


def print_planning(sizes: Sequence[int]) -> None:
    """Times what is computed of a pipeline with 8 micro-batches per rank, 2BW with one."""

    def shape(n: int, schedule: str = "interleaved_1f1b") -> PipelineShape:
        per_rank = 2 if schedule == "interleaved_1f1b" else 1
        count = {"pipedream": 1, "pipedream_2bw": n}.get(schedule, 8 * n)
        return PipelineShape(schedule, count, (2,) * (per_rank * n), n - 1, per_rank)

    def costs(n: int) -> StepCosts:
        return StepCosts(tuple(LayerCosts("layer", 1.0, 2.0) for _ in range(4 * n)), 0.0)

    tasks: dict[str, Callable[[int], Any]] = {
        "a rank's own actions, interleaved_1f1b": lambda n: Rounds(shape(n)),
        "a rank's own actions, pipedream": lambda n: Rounds(shape(n, "pipedream")).drain(n),
        "all ranks' actions, interleaved_1f1b": lambda n: lower(shape(n).build()),
        "the simulated step, interleaved_1f1b": lambda n: simulate(
            lower(shape(n).build()), StageCosts.uniform(2 * n)
        ),
        "the predicted timeline, pipedream_2bw": lambda n: predicted_timeline(
            shape(n, "pipedream_2bw"), StageCosts.uniform(n)
        ),
        "a cut's step, interleaved_1f1b": lambda n: step_seconds(
            costs(n), shape(n), shape(n).layers_per_stage
        ),
        "copies of weights, pipedream": lambda n: num_copies(shape(n, "pipedream"), "stash"),
        "the best cut of 8 layers per stage": lambda n: partition_layers(range(1, 8 * n + 1), n),
        "the groups of a mesh": lambda n: [MESH.mesh(n).groups(a) for a in ("pp", "dp_replicate")],
    }
    rows: list[Row] = [
        (name, [1e3 * seconds_of(lambda n=n, run=run: run(n)) for n in sizes])  # type: ignore[misc]
        for name, run in tasks.items()
    ]
    print_table("Milliseconds of planning, on one rank", sizes, rows, digits=2, noise=NOISE / 3)


# --- real processes ------------------------------------------------------------------------------


def measure(layouts: Sequence[Layout], sizes: Sequence[int]) -> dict[str, list[list[RankCost]]]:
    found: dict[str, list[list[RankCost]]] = {layout.name: [] for layout in layouts}
    runs = [(layout, num_ranks) for layout in layouts for num_ranks in sizes]
    for layout, num_ranks in track(runs, description="real processes"):
        workers = WorkerPool()  # fresh ones: the threads of a run's groups outlive the run
        try:
            costs = workers.run(num_ranks, on_rank, layout.name, num_ranks, timeout=400)
        finally:
            workers.close()
        found[layout.name].append(costs)
    return found


def print_measured(found: dict[str, list[list[RankCost]]], sizes: Sequence[int]) -> None:
    def rows(value: Callable[[RankCost], float]) -> list[Row]:
        return [(name, [max(map(value, costs)) for costs in runs]) for name, runs in found.items()]

    def beside(
        title: str, value: Callable[[RankCost], float], count: Callable[..., int], unit: int = 1
    ) -> None:
        table: list[Row] = []
        for name, measured in rows(value):
            said = [largest(count, LAYOUTS[name], n, SIZES) for n in sizes]
            table.append((name, [number / unit for number in measured]))
            table.append(("  on paper", [number / unit for number in said]))
        print_table(f"{title}, of the rank that sends most", sizes, table)

    beside("TCP segments of a step, messages", lambda cost: cost.segments, paper.num_messages)
    beside("KiB sent in a step", lambda cost: cost.num_bytes, paper.num_bytes, KIB)
    for moment in ("ranks have met", "model is placed", "first step"):
        until = f"from the Trainer's begin until {moment}"
        print_table(
            f"Milliseconds of a rank's processor {until}",
            sizes,
            rows(lambda cost, moment=moment: 1e3 * cost.start[moment][1]),  # type: ignore[misc]
            noise=NOISE,
        )
    print_table(
        "Seconds until the first step has ended, all processes on this machine's cores",
        sizes,
        rows(lambda cost: cost.start["first step"][0]),
        digits=2,
        noise=NOISE,
    )
    print_table("Process groups of a rank", sizes, rows(lambda cost: cost.groups))
    print_table("Connections of a rank", sizes, rows(lambda c: c.sent_at_start.connections))
    print_table("Open files and sockets", sizes, rows(lambda cost: cost.after.descriptors))
    print_table("Threads", sizes, rows(lambda cost: cost.after.threads))
    print_table(
        "KiB to and from the store until the first step has ended",
        sizes,
        rows(lambda c: (c.sent_at_start.to_store + c.sent_at_start.from_store) / KIB),
        digits=1,
    )
    print_table(
        "MiB of own memory that a run adds to a process that has imported everything",
        sizes,
        rows(lambda cost: (cost.after.own - cost.before.own) / MIB),
        digits=1,
        noise=NOISE,
    )
    print_table(
        "Milliseconds of a rank's processor in all_gather_object, in the whole run",
        sizes,
        rows(lambda cost: 1e3 * cost.calls.cpu["all_gather_object"]),
        noise=NOISE,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="layouts whose name contains one of these, by |")
    parser.add_argument("--paper", type=int, nargs="*", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4, 8, 16])
    options = parser.parse_args()
    wanted = options.only.split("|")
    layouts = [layout for name, layout in LAYOUTS.items() if any(w in name for w in wanted)]
    if options.paper:
        print_paper(layouts, options.paper)
        print_planning(options.paper)
    if options.processes:
        print_measured(measure(layouts, options.processes), options.processes)


if __name__ == "__main__":
    main()
