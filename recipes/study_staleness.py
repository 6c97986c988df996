"""The cost of stale weights, and its remedies: train the recipe's GPT in each asynchronous way.

On the ranks are stages of a pipeline, replicas that step by themselves (local SGD, DiLoCo), or
workers of a parameter server.

.. code-block:: bash

    python -m recipes.study_staleness --quick                       # about a minute
    python -m recipes.study_staleness                               # about 40 minutes on 2 cores
    python -m recipes.study_staleness --only pipedream predict --stages 8 --optimizers adamw
    python -m recipes.study_staleness --only sync predict "diloco, 20" --width 128 --tokens 4000000
    python -m recipes.study_staleness --redraw

Results do not depend on the speed of ranks, so each training runs in one process
(:mod:`recipes.staleness.lockstep`, :mod:`recipes.staleness.replicas`), and as many at a time as
there are cores. The time that a run would have taken is simulated, also over links of some rates.
Finished trainings are kept in a CSV file and not run again; ``--redraw`` trains nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_dist.engine.planning.links import Link
from recipes.gpt import build_gpt
from recipes.staleness.network import Network
from recipes.staleness.optimizers import OPTIMIZERS
from recipes.staleness.picture import draw
from recipes.staleness.results import Results
from recipes.staleness.summary import Curve, curves, network_table, price, table
from recipes.staleness.training import Sizes, layers_of_stages, train
from recipes.staleness.trial import METHODS, SYNC, Trial, trials

_LATENCY_SECONDS = 50e-6
_NEAR = 1.1
"""How near to the synchronous training's last loss others must come, by default."""
_QUICK = ["--tokens=6144", "--seeds=1", "--stages", "2", "4", "--rates=1", "--optimizers=adamw"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: Words of the command line; None takes those of the process.
    """
    options = _parser().parse_args(arguments)
    if options.quick:
        options = _parser().parse_args(_QUICK, argparse.Namespace(**vars(options)))
    chosen = Sizes(
        1, options.looks, options.batch_size, options.length, options.width, options.depth
    )
    sizes = replace(chosen, num_updates=max(1, options.tokens // chosen.batch_tokens))
    for count in options.stages:
        layers_of_stages(sizes.depth, count)
        if sizes.batch_size % count:
            raise ValueError(
                f"batch_size={sizes.batch_size} windows must be a multiple of stages={count}: as"
                " many replicas share them."
            )
    methods = [method for method in METHODS if not options.only or method.name in options.only]
    seeds = range(options.seeds)
    asked = list(trials(options.optimizers, methods, options.stages, options.rates, seeds))
    results = Results(options.out / "results.csv", sizes)
    if not options.redraw:
        run([trial for trial in asked if trial not in results], sizes, results, options.jobs)
    report(results, sizes, options)


def run(missing: Sequence[Trial], sizes: Sizes, results: Results, num_processes: int) -> None:
    """Trains in parallel, and writes each result down as it comes.

    Args:
        missing: Trials to train.
        sizes: Sizes of the trainings.
        results: Results to add to.
        num_processes: Number of processes at a time.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    context = multiprocessing.get_context("spawn")
    with (
        Progress(*columns) as progress,
        ProcessPoolExecutor(num_processes, context, torch.set_num_threads, (1,)) as pool,
    ):
        bar = progress.add_task("training", total=len(missing))
        futures = {pool.submit(train, trial, sizes): trial for trial in missing}
        for future in as_completed(futures):
            trial, looks = futures[future], future.result()
            results.add(trial, looks)
            progress.console.print(f"{looks[-1].bits_per_byte:.3f} bits per byte: {trial}")
            progress.advance(bar)


def report(results: Results, sizes: Sizes, options: argparse.Namespace) -> None:
    """Prints and writes the tables, and draws the pictures.

    Args:
        results: All results.
        sizes: Sizes of the trainings.
        options: Options of the command line.
    """
    tables = []
    for optimizer in options.optimizers:
        found = list(
            curves(results, optimizer, options.stages, options.rates, range(options.seeds))
        )
        if not found:
            continue
        tokens = sizes.num_updates * sizes.batch_tokens
        count = f"{options.seeds} seed{'s' * (options.seeds != 1)}"
        title = f"{optimizer}, {tokens:,} tokens, {count}"
        tables.append(f"{title}:\n\n{table(found, options.stages)}\n")
        tables += over_links(found, sizes, options)
        if cost := price(found, options.stages[-1]):
            tables.append(f"{cost}\n")
        draw(found, options.stages, sizes.batch_tokens, title, options.out / f"{optimizer}.png")
    text = "\n".join(tables)
    (options.out / "table.md").write_text(text)
    print(text)
    print(f"Written to {options.out}: results.csv, table.md and a picture for each optimizer.")


def over_links(found: Sequence[Curve], sizes: Sizes, options: argparse.Namespace) -> list[str]:
    """Writes a table for each number of ranks: when a loss is reached over links of some rates.

    Args:
        found: Curves of one optimizer.
        sizes: Sizes of the trainings.
        options: Options of the command line.
    """
    sync = [curve.means[-1] for curve in found if curve.clocked.method is SYNC]
    target = options.target or (_NEAR * sync[0] if sync else None)
    if target is None:
        return []
    model = build_gpt(width=sizes.width, depth=sizes.depth)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    networks = {
        f"{gigabits:g} Gbit/s": Network.of(
            Link(_LATENCY_SECONDS, gigabits * 1e9 / 8),
            options.flops,
            num_parameters,
            sizes.batch_tokens,
            sizes.width,
        )
        for gigabits in options.gigabits
    }
    return [
        f"Simulated seconds to {target:.3f} bits per byte, {n} ranks of {options.flops:g} FLOP/s:"
        f"\n\n{network_table(found, n, networks, target)}\n"
        for n in options.stages
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.study_staleness",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="a small part, to see that it works")
    add("--tokens", type=int, default=102_400, help="of a training")
    add("--seeds", type=int, default=3, help="repetitions")
    add("--stages", type=int, nargs="+", default=[2, 4, 8])
    add("--rates", type=float, nargs="+", default=[1.0], help="factors; the best counts")
    add("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    add("--only", nargs="+", choices=[m.name for m in METHODS], help="some of the methods")
    add("--width", type=int, default=Sizes(1, 1).width, help="of the model")
    add("--depth", type=int, default=Sizes(1, 1).depth, help="blocks of the model")
    add("--batch-size", type=int, default=Sizes(1, 1).batch_size, help="windows of an update")
    add("--length", type=int, default=Sizes(1, 1).sequence_length, help="bytes of a window")
    add("--gigabits", type=float, nargs="+", default=[10.0, 1.0, 0.1], help="a second, of links")
    add("--flops", type=float, default=1e10, help="a second, of a device")
    add("--target", type=float, help="bits per byte to reach over links; 10 %% above sync's")
    add("--looks", type=int, default=10, help="points of a curve")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="trainings at a time")
    add("--out", type=Path, default=Path("runs/staleness"))
    add("--redraw", action="store_true", help="train nothing")
    return parser


if __name__ == "__main__":
    main()
