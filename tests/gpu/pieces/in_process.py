"""Pipelines of two stages in one process: no messages, and so all of the engine but these."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.engine.pipeline.connect import connect_in_memory
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.schedules.registry import (
    SCHEDULE_NAMES,
    PipelineShape,
    find_schedules,
)
from lightning_dist.engine.splitting.cut import layers_of
from recipes.gpt import build_gpt
from tests.benchmarks.contestants import loss_of
from tests.gpu.ranks import attempt, beside_goal, exact_products, within
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.networks.models import make_data, make_layers
from tests.helpers.processes.threads import run_ranks, shapes_of

LAYERS = {1: (4, 4), 2: (2, 2, 2, 2)}
"""Of :func:`make_layers`, for one or two stages on each of two ranks."""
NUM_MICROBATCHES, BATCH_SIZE, NUM_BATCHES, WARMUP = 4, 8, 8, 3
TOLERANCE = 1e-9

Batch = tuple[Tensor, Tensor]


def shapes(schedule: str) -> list[PipelineShape]:
    per_rank = len(find_schedules(schedule).rank_of_stage(2)) // 2
    count = {"pipedream": 1, "pipedream_2bw": 2}.get(schedule, NUM_MICROBATCHES)
    return shapes_of(schedule, count, LAYERS[per_rank])


def make_model(setting: Setting) -> nn.Sequential:
    torch.manual_seed(7)
    return make_layers().double().to(setting.torch_device)


def batches(setting: Setting) -> list[Batch]:
    x, y = (part.to(setting.torch_device) for part in make_data(NUM_BATCHES * BATCH_SIZE).tensors)
    return list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))


def step_of(net: nn.Module) -> Callable[[Any], Tensor]:
    def step(microbatch: Any) -> Tensor:
        x, y = microbatch.content
        return F.cross_entropy(net(x), y)

    return step


# --- no host synchronisation ---------------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Notes operations by which the host reads a value, and on a GPU would wait for it."""

    NAMES = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in self.NAMES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@dataclass
class SyncWatch:
    """Finds where the host waits for the device, once all ranks are warm.

    On a GPU torch raises there, in all threads, from the first rank's :meth:`begin` on. On a CPU
    reads of values are noted, in the thread of the rank.
    """

    setting: Setting
    reads: list[str] = field(default_factory=list)

    def begin(self) -> Callable[[], None]:
        """Begins to look; returns the function that ends it, in the same thread."""
        if self.setting.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
            return lambda: None
        mode = HostReads()
        mode.__enter__()

        def end() -> None:
            mode.__exit__(None, None, None)
            self.reads += mode.found

        return end

    def close(self) -> None:
        if self.setting.is_gpu:
            torch.cuda.set_sync_debug_mode("default")


def no_sync(setting: Setting) -> Iterator[Row]:
    """Runs each schedule on two ranks of this process."""
    what = "a step that reads a value is found"
    yield attempt(what, lambda: _finds_reads(what, setting))
    for name in SCHEDULE_NAMES:
        what = f"steady steps of {name}"
        yield attempt(what, partial(_steady, what, setting, name))


def _steady(what: str, setting: Setting, schedule: str, *, reads_loss: bool = False) -> Row:
    watch = SyncWatch(setting)

    def train(net: nn.Sequential, pipeline: Pipeline) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        end: Callable[[], None] = lambda: None  # noqa: E731
        for number, batch in enumerate(data):
            if number == WARMUP:
                end = watch.begin()
            results = pipeline.train_batch(batch, step_of(net))
            if reads_loss:
                [float(result.detach()) for result in results]
            if pipeline.has_gradients:
                optimizer.zero_grad()
                pipeline.install_gradients()
                with pipeline.updating():
                    optimizer.step()
        end()

    data = batches(setting)
    setting.synchronize()
    try:
        make = partial(make_model, setting)
        run_ranks(make, shapes(schedule), train, device=setting.torch_device)
    finally:
        watch.close()
    found = ", ".join(sorted(set(watch.reads))) or "none"
    verdict = Verdict.FAILS if watch.reads else Verdict.HOLDS
    return Row(what, f"host synchronisations: {found}", "none", verdict)


def _finds_reads(what: str, setting: Setting) -> Row:
    """Shows that the search can find something."""
    try:
        row = _steady(what, setting, "gpipe", reads_loss=True)
    except RuntimeError as error:
        found = str(error).splitlines()[0]
        is_found = "synchronizing" in found
        return Row(what, found, "an error", Verdict.HOLDS if is_found else Verdict.FAILS)
    is_found = row.verdict is Verdict.FAILS
    return Row(what, row.found, "some", Verdict.HOLDS if is_found else Verdict.FAILS)


# --- compiled layers and stages ------------------------------------------------------------------


def compiled(setting: Setting) -> Iterator[Row]:
    """Trains compiled layers, and compiled stages, beside the same ones uncompiled."""
    exact_products()
    for name in SCHEDULE_NAMES:
        eager = _train_compiled(setting, name, "not")
        for how in ("layers", "stages"):
            what = f"compiled {how}, {name}"
            yield attempt(what, partial(_compiled_row, what, setting, name, how, eager))


def _compiled_row(
    what: str, setting: Setting, schedule: str, how: str, eager: dict[str, Tensor]
) -> Row:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    found = _train_compiled(setting, schedule, how)
    difference = max(float((found[name] - eager[name]).abs().max()) for name in eager)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    row = within(what, difference, TOLERANCE, f"{difference:.1e}, {graphs} graphs")
    return row if graphs else Row(what, "nothing was compiled", "some graphs", Verdict.FAILS)


def _train_compiled(setting: Setting, schedule: str, how: str) -> dict[str, Tensor]:
    models: list[nn.Sequential] = []
    ranks = shapes(schedule)

    def make() -> nn.Sequential:
        net = make_model(setting)
        if how == "layers":
            for layer in net:
                layer.compile(backend=setting.compiler)
        models.append(net)
        return net

    def layers(stage: int) -> nn.Module:
        rank = ranks[0].rank_of_stage[stage]
        whole = layers_of(models[rank], ranks[0].layers_per_stage, stage)
        whole.compile(backend=setting.compiler)
        return whole

    def train(net: nn.Sequential, pipeline: Pipeline) -> dict[str, Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

        def update() -> None:
            optimizer.zero_grad()
            pipeline.install_gradients()
            with pipeline.updating():
                optimizer.step()

        for batch in data:
            pipeline.train_batch(batch, step_of(net))
            if pipeline.has_gradients:
                update()
        for _ in pipeline.drain():
            update()
        return {name: p.detach().clone() for name, p in net.named_parameters()}

    data = batches(setting)
    options = {"layers": layers} if how == "stages" else {}
    # The default of 30 s is for what is not compiled.
    parts = run_ranks(make, ranks, train, device=setting.torch_device, seconds=120, **options)
    return {name: value for part in parts for name, value in part.items()}


# --- what the engine costs -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A GPT and its batch."""

    width: int
    depth: int
    heads: int
    batch: int
    length: int
    turns: int


ON_GPU = Sizes(width=768, depth=12, heads=12, batch=8, length=512, turns=15)
ON_CPU = Sizes(width=32, depth=2, heads=2, batch=4, length=16, turns=3)
TURN, GOAL = 4, 0.95


def overhead(setting: Setting) -> Iterator[Row]:
    """Times two stages of this process beside a loop over the same micro-batches, in turns."""
    for schedule in ("interleaved_1f1b", "looped_bfs", "zbv"):
        what = f"2 stages in one process, {schedule}"
        yield attempt(what, partial(_overhead_row, what, setting, schedule))


def _overhead_row(what: str, setting: Setting, schedule: str) -> Row:
    sizes = ON_GPU if setting.is_gpu else ON_CPU
    device = setting.torch_device
    torch.manual_seed(0)
    net = build_gpt(width=sizes.width, depth=sizes.depth, num_heads=sizes.heads).to(device)
    shape = (2, sizes.batch, sizes.length)
    x, y = torch.randint(256, shape, device=device)
    raw = _raw_loop(copy.deepcopy(net), x, y)
    half = len(net) // 2
    rank = PipelineShape(
        schedule, NUM_MICROBATCHES, (half, len(net) - half), rank=0, stages_per_rank=2
    )
    (links,) = connect_in_memory((0, 0))
    pipeline = Pipeline(net, rank, links, StageOptions(device=device))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def step(microbatch: Any) -> Tensor:
        inputs, targets = microbatch.content
        return loss_of(net(inputs), targets)

    def ours() -> None:
        pipeline.train_batch((x, y), step)
        optimizer.zero_grad()
        pipeline.install_gradients()
        with pipeline.updating():
            optimizer.step()

    times = [(seconds(setting, raw), seconds(setting, ours)) for _ in range(sizes.turns + 2)][2:]
    ratio = statistics.median(theirs / own for theirs, own in times)
    own, theirs = statistics.median(o for _, o in times), statistics.median(t for t, _ in times)
    found = f"{own * 1e3:.2f} ms per batch, loop {theirs * 1e3:.2f}; {ratio:.3f} x the loop"
    return beside_goal(what, found, setting, ratio, GOAL)


def _raw_loop(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    def run() -> None:
        optimizer.zero_grad()
        pieces = zip(x.chunk(NUM_MICROBATCHES), y.chunk(NUM_MICROBATCHES), strict=True)
        for inputs, targets in pieces:
            (loss_of(net(inputs), targets) / NUM_MICROBATCHES).backward()
        optimizer.step()

    return run


def seconds(setting: Setting, run: Callable[[], None]) -> float:
    """Returns the time of a batch, of some in a row."""
    setting.synchronize()
    began = time.perf_counter()
    for _ in range(TURN):
        run()
    setting.synchronize()
    return (time.perf_counter() - began) / TURN
