# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: -all
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Pipelines and bubbles
#
# You know how to train a model on one device. This lesson shows how to train one model on several
# devices, each with a part of its layers. You will
#
# 1. cut a small GPT into stages, and a batch into micro-batches;
# 2. draw three schedules: `gpipe`, `1f1b` and `pipedream`;
# 3. compare the time that is lost in waiting, the *bubble*, with a formula;
# 4. train with real processes, measure the bubble, and see why it is not what the formula says.
#
# Two CPU cores are enough, and nothing needs the network. All numbers below are printed by code.

# %%
import copy
import subprocess
import sys
import tempfile
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import display
from torch import Tensor, nn

from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.lowering import lower
from lightning_dist.engine.schedules.registry import build_schedule
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.engine.schedules.timeline import SpanKind, Timeline
from lightning_dist.plotting import plot_timelines
from lightning_dist.plotting.chrome_trace import read_chrome_trace
from recipes.gpt import build_gpt

# %matplotlib inline

# %% [markdown]
# ## Why cut a model into stages?
#
# A model can be too large for one device. Its weights, their gradients and the optimizer's state
# must all fit. A *pipeline* puts the first layers on the first device and the next ones on the
# next. Each part is called a *stage*, and the process that runs it is called a *rank*. Between two
# stages only an activation travels forward, and its gradient travels back.
#
# Here is the GPT of the recipes. It is an `nn.Sequential`, so a cut is a slice.

# %%
torch.manual_seed(0)
model = build_gpt().double()
stages = [model[:3], model[3:]]

for index, stage in enumerate(stages):
    names = ", ".join(type(layer).__name__ for layer in stage)
    print(f"stage {index}: {names:24}{sum(p.numel() for p in stage.parameters()):>9,} parameters")

tokens = torch.randint(256, (8, 33))
inputs, targets = tokens[:, :-1], tokens[:, 1:]
at_the_cut = stages[0](inputs)
print("at the cut travels a tensor of shape", tuple(at_the_cut.shape))
print("same result as the whole model:", torch.equal(stages[1](at_the_cut), model(inputs)))

# %% [markdown]
# The result is the same, but is it fast? Stage 1 cannot start before stage 0 is done, and the
# backward goes the other way. Let us draw four stages with one batch. A row is a rank, a column is
# a slot of time, `F0` is the forward of batch 0, `B0` its backward, and a dot is a rank that
# waits.

# %%
print(build_schedule("gpipe", num_stages=4, num_microbatches=1).format_grid())

# %% [markdown]
# Only one rank works at a time. Four devices are no faster than one. The dots are the *bubble*.
#
# ## What is a micro-batch?
#
# The cure is to cut the batch too. A *micro-batch* is a slice of the batch. While stage 1 works on
# the first slice, stage 0 can work on the second.
#
# Cutting a batch does not change what is learned. The loss is a mean over the batch, so the
# gradient of the batch is the mean of the gradients of equal slices. This is the gradient
# accumulation that you may know from one device. We check it.


# %%
def mean_loss(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Gives the mean loss of a batch or of a slice of one."""
    return F.cross_entropy(network(inputs).flatten(0, 1), targets.flatten())


whole, sliced = model, copy.deepcopy(model)
mean_loss(whole, inputs, targets).backward()

num_microbatches = 4
for part, part_targets in zip(
    inputs.chunk(num_microbatches), targets.chunk(num_microbatches), strict=True
):
    (mean_loss(sliced, part, part_targets) / num_microbatches).backward()

pairs = zip(whole.parameters(), sliced.parameters(), strict=True)
difference = max(float((a.grad - b.grad).abs().max()) for a, b in pairs)
print(f"largest gradient:   {max(float(p.grad.abs().max()) for p in whole.parameters()):.1e}")
print(f"largest difference: {difference:.1e}")

# %% [markdown]
# The difference is the rounding of `float64` and nothing else. (A layer that mixes the samples of
# a batch, such as BatchNorm, is the exception.)
#
# ## Schedules
#
# A *schedule* says in which order each rank does its forwards and backwards. In this package a
# schedule is plain data, so we can print it before anything runs. Here are two schedules for four
# stages and four micro-batches.

# %%
for name in ("gpipe", "1f1b"):
    schedule = build_schedule(name, num_stages=4, num_microbatches=4)
    kept = [schedule.in_flight(rank) for rank in range(4)]
    print(f"{name}: micro-batches in flight on each rank, at most: {kept}")
    print(schedule.format_grid(), end="\n\n")

# %% [markdown]
# - **gpipe** does all forwards, then all backwards. A rank keeps the activations of every
#   micro-batch until its backward.
# - **1f1b** (*one forward, one backward*) starts each backward as soon as it can. Later ranks keep
#   fewer micro-batches in memory. With more micro-batches than stages the first rank does too.
#
# Both wait until the last backward is done, update the weights once, and then take the next batch.
# This wait is called a *flush*. Both learn exactly what one device learns.
#
# A grid gives each action one slot. A backward really takes about twice as long as a forward, for
# it computes two gradients: of the weights and of the inputs. The simulator takes such costs and
# gives a *timeline*: who did what, from when to when. The numbers in the boxes are the
# micro-batches.

# %%
costs = StageCosts.uniform(4, forward_seconds=0.010, backward_seconds=0.020)
one_batch = {
    name: simulate(build_schedule(name, num_stages=4, num_microbatches=4), costs)
    for name in ("gpipe", "1f1b")
}
display(plot_timelines(one_batch))

# %% [markdown]
# The order differs, the bubble does not: `1f1b` saves memory, not time.
#
# **pipedream** saves time. It has the order of `1f1b`, but it never flushes. Each batch goes
# through whole, without micro-batches, and the next ones follow at once. Each rank updates its own
# weights after each backward. There is a price: a batch that is under way meets weights that do
# not know the updates of the batches just before it. They are *stale*. So that forward and
# backward of a batch use the same weights, a rank keeps the old version until the backward is
# done.
#
# A training run has many batches, so we draw more than one, and for `pipedream` the middle of a
# long run. Both do the same work per batch: what `pipedream` does in one piece, `1f1b` does in
# four. In the rows of `pipedream` the numbers are batches.


# %%
def repeat(timeline: Timeline, times: int) -> Timeline:
    """Puts a flushed batch behind itself some times."""
    length = timeline.makespan_seconds
    spans = (
        replace(
            span,
            start_seconds=span.start_seconds + turn * length,
            end_seconds=span.end_seconds + turn * length,
        )
        for turn in range(times)
        for span in timeline.spans
    )
    return replace(timeline, spans=tuple(spans))


whole_batch = StageCosts.uniform(4, forward_seconds=0.040, backward_seconds=0.080)
endless = simulate(build_schedule("pipedream", num_stages=4, num_microbatches=20), whole_batch)
three_batches = repeat(one_batch["1f1b"], 3)
start = 8 * (0.040 + 0.080)  # long after the pipeline has filled
shown = endless.between(start, start + three_batches.makespan_seconds)
display(plot_timelines({"1f1b, three batches": three_batches, "pipedream, equally long": shown}))

# %% [markdown]
# The grey between the batches of `1f1b` is the price of the flush. `pipedream` does not pay it.
#
# ## The bubble and its formula
#
# The *bubble fraction* is the share of the ranks' time in which they do not compute. For `gpipe`
# and `1f1b` it can be counted in the grid. With $n$ equal stages and $m$ micro-batches each rank
# works for $m$ micro-batches and waits for $n - 1$ more, while the pipeline fills and empties:
#
# $$\text{bubble fraction} = \frac{n - 1}{m + n - 1}$$
#
# Let us ask the simulator whether that is so.


# %%
def formula(num_stages: int, num_microbatches: int) -> float:
    """Gives the closed form."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def simulated_bubble(name: str, num_stages: int, num_microbatches: int) -> float:
    """Gives what the simulator says for equal stages."""
    schedule = build_schedule(name, num_stages=num_stages, num_microbatches=num_microbatches)
    return simulate(schedule, StageCosts.uniform(num_stages)).bubble_fraction


microbatches = [1, 2, 4, 8, 16, 32, 64]
figure, axes = plt.subplots(figsize=(8, 4))
for num_stages, colour in ((2, "#56B4E9"), (4, "#0072B2"), (8, "#E69F00")):
    line = [formula(num_stages, m) for m in microbatches]
    dots = {
        name: [simulated_bubble(name, num_stages, m) for m in microbatches]
        for name in ("gpipe", "1f1b")
    }
    worst = max(abs(a - b) for row in dots.values() for a, b in zip(row, line, strict=True))
    print(f"{num_stages} stages: largest distance from the formula {worst:.1e}")
    axes.plot(microbatches, line, color=colour, label=f"{num_stages} stages")
    axes.plot(microbatches, dots["gpipe"], "s", color=colour, markersize=10, fillstyle="none")
    axes.plot(microbatches, dots["1f1b"], "o", color=colour, markersize=4)
axes.set_xscale("log", base=2)
axes.set_xticks(microbatches, [str(m) for m in microbatches])
axes.set_xlabel("micro-batches per batch")
axes.set_ylabel("bubble fraction")
axes.set_title("Lines: formula. Squares: gpipe, dots: 1f1b, both simulated.", fontsize=11)
axes.set_ylim(0, 1)
axes.yaxis.set_major_formatter("{x:.0%}")
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# More micro-batches make the bubble smaller. But they do not come free: each one has a cost of its
# own, small tensors use a device badly, and `gpipe` keeps them all in memory.
#
# `pipedream` follows the same formula if $m$ counts the batches between two moments at which the
# pipeline runs empty, for example before a validation. There are usually hundreds of them, so the
# bubble is almost nothing.
#
# ## A real run
#
# So much for theory. Now two real processes train the GPT, each with one stage, first with `1f1b`,
# then with `pipedream`. We start them as you would in a terminal. Each run writes what its ranks
# did when as a Chrome trace, and we read that.

# %%
NUM_STAGES, NUM_MICROBATCHES = 2, 4

OPTIONS = {
    "1f1b": [f"--trainer.strategy.init_args.num_microbatches={NUM_MICROBATCHES}"],
    "pipedream": [],
}


def train(schedule: str) -> Timeline:
    """Trains for a few batches and gives what was measured."""
    with tempfile.TemporaryDirectory() as directory:
        command = [
            *(sys.executable, "-m", "recipes.train", "fit"),
            f"--config={files('recipes') / 'configs' / f'gpt_{schedule}.yaml'}",
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=16",
            "--trainer.limit_val_batches=1",
            "--trainer.enable_progress_bar=false",
            *OPTIONS[schedule],
        ]
        run = subprocess.run(command, cwd=directory, capture_output=True, text=True)
        if run.returncode != 0:
            raise RuntimeError(run.stdout + run.stderr)
        return read_chrome_trace(Path(directory, f"runs/gpt_{schedule}/version_0/trace.json"))


traces = {schedule: train(schedule) for schedule in OPTIONS}
for name, trace in traces.items():
    print(
        f"{name}: {len(trace.spans)} spans of {trace.num_ranks} ranks"
        f" in {trace.makespan_seconds:.1f} seconds"
    )

# %% [markdown]
# The first batches are slow: memory is allocated and caches are cold. We leave them out. Each
# batch ends with one update on rank 0, so these updates say where to cut. For a picture we choose
# a stretch of typical length.

# %%
WARM_UP = 4


def batch_ends(timeline: Timeline) -> list[float]:
    """Finds when rank 0 was done with each batch."""
    updates = (s for s in timeline.spans if s.rank == 0 and s.kind is SpanKind.UPDATE)
    return sorted(span.end_seconds for span in updates)


def typical(timeline: Timeline, num_batches: int) -> Timeline:
    """Cuts out the stretch of some batches that is of median length."""
    ends = batch_ends(timeline)
    stretches = list(zip(ends, ends[num_batches:], strict=False))
    stretches.sort(key=lambda stretch: stretch[1] - stretch[0])
    return timeline.between(*stretches[len(stretches) // 2])


measured = {
    name: trace.between(batch_ends(trace)[WARM_UP - 1], batch_ends(trace)[-1])
    for name, trace in traces.items()
}

# %% [markdown]
# To predict the same run, the simulator needs to know how long a forward and a backward take on
# each stage. We take the means of the spans after the warm-up. `lower` adds the sends, receives and
# updates to a schedule, so that the simulated ranks do all that the real ones do.


# %%
def measured_costs(trace: Timeline) -> StageCosts:
    """Takes the mean duration of each kind of work after the warm-up."""
    warm = batch_ends(trace)[WARM_UP - 1]

    def average(kind: ActionKind, *ranks: int) -> float:
        return mean(
            span.duration_seconds
            for span in trace.spans
            if span.action.kind is kind and span.rank in ranks and span.start_seconds >= warm
        )

    ranks = range(trace.num_ranks)
    return StageCosts(
        tuple(average(ActionKind.FORWARD, rank) for rank in ranks),
        tuple(average(ActionKind.BACKWARD, rank) for rank in ranks),
        update_seconds=average(ActionKind.STEP, *ranks),
    )


# %%
found = {name: measured_costs(trace) for name, trace in traces.items()}
for name, stage_costs in found.items():
    for rank in range(NUM_STAGES):
        print(
            f"{name:10} rank {rank}:"
            f" forward {stage_costs.forward_seconds[rank] * 1e3:5.1f} ms,"
            f" backward {stage_costs.backward_seconds[rank] * 1e3:5.1f} ms"
        )

one_flush = build_schedule("1f1b", num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES)
long_run = build_schedule("pipedream", num_stages=NUM_STAGES, num_microbatches=16)
filled_to_drained = simulate(lower(long_run), found["pipedream"])
ends = batch_ends(filled_to_drained)
simulated = {
    "1f1b": simulate(lower(one_flush), found["1f1b"]),
    "pipedream": filled_to_drained.between(ends[5], ends[8]),  # three batches of its middle
}

# %% [markdown]
# One function draws both, the simulated and the measured. A white end of a row means that this run
# was done earlier.

# %%
for name, num_batches in (("1f1b", 1), ("pipedream", 3)):
    pair = {
        f"{name}, simulated with the measured costs": simulated[name],
        f"{name}, measured": typical(measured[name], num_batches),
    }
    display(plot_timelines(pair))

# %% [markdown]
# The order of the boxes is the same in each pair: the ranks execute the very schedule that is
# simulated. What is not the same is how long things take. Here are the bubbles of all measured
# batches, not only of those in the picture. The last three columns split the measured one: waiting
# for the other rank (the schedule's own bubble is in it), sending, and all else between two
# actions.


# %%
def share(timeline: Timeline, kind: SpanKind) -> float:
    """Gives the share of the ranks' time that one kind of span takes."""
    taken = sum(span.duration_seconds for span in timeline.spans if span.kind is kind)
    return taken / (timeline.num_ranks * timeline.makespan_seconds)


predicted = {"1f1b": formula(NUM_STAGES, NUM_MICROBATCHES), "pipedream": 0.0}

print(f"{'':10}  formula  simulated  measured  =  waiting + sending + other")
for name, timeline in measured.items():
    bubble = timeline.bubble_fraction
    waiting = share(timeline, SpanKind.WAIT)
    sending = share(timeline, SpanKind.COMMUNICATION)
    print(
        f"{name:10}  {predicted[name]:7.1%}  {simulated[name].bubble_fraction:9.1%}"
        f"  {bubble:8.1%}     {waiting:7.1%}   {sending:7.1%} {bubble - waiting - sending:7.1%}"
    )

# %% [markdown]
# ## Why do they differ?
#
# Each column knows more than the one before it.
#
# - The **formula** assumes equal stages, and that nothing but forwards and backwards takes time.
#   For `pipedream` it gives zero, for between the batches we look at the pipeline never runs
#   empty.
# - The **simulation** knows how long each stage takes on average. If one stage is heavier, the
#   other one waits for it under every schedule.
# - The **measurement** has all the rest. Tensors are copied from process to process. Between two
#   batches Lightning fetches data, logs and calls its hooks. No two forwards take the same time:
#   when one is late, the other rank waits, and under a schedule without slack that time is lost.
#
# To be honest: this model is tiny, so these costs are large beside its computing. The batches are
# few. And if other programs share your cores, the last columns say as much about them as about the
# schedule, so they change from run to run. When the stages sleep for a fixed time instead of
# computing, as in `make bench`, the measured bubble comes close to the formula. So the formula is
# not wrong: it is what is left when everything else is perfect. Read a measured bubble together
# with its timeline.
#
# ## Try it
#
# - Set `NUM_MICROBATCHES` to 1, then to 8. What happens to the formula, and what to the
#   measurement?
# - Add `"--trainer.strategy.init_args.partition=[2, 4]"` to both lists in `OPTIONS`. Which rank
#   waits now, and does the simulation see it?
# - In `StageCosts.uniform`, give the transfers a cost with `transfer_seconds`. Which schedule
#   suffers most?
