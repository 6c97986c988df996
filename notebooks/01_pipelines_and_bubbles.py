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
# Here is your LightningModule. To train it on two devices, each with a part of its layers, add this
# to its Trainer:
#
# ```python
# strategy=PipelineStrategy(schedule="1f1b")
# ```
#
# The module stays as it is. These words are all that the first run needs:
#
# - A *rank* is a process, and has a device. A *stage* is the part of the layers that a rank has.
# - A *micro-batch* is a slice of a batch. While stage 1 works on one, stage 0 works on the next.
# - A *schedule* says in which order each rank works.
# - The *bubble* is the time in which ranks do not compute.
#
# You will then draw three schedules, compare their bubbles with a formula, and see why a measured
# bubble is not what the formula says. Two CPU cores are enough, and nothing needs the network. All
# numbers below are printed by code.

# %%
# %%writefile train_gpt.py
import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StepProfiler
from recipes.gpt import build_gpt


class LanguageModel(L.LightningModule):
    """Predicts the next byte."""

    def __init__(self):
        super().__init__()
        self.model = build_gpt()  # an nn.Sequential: an embedding, four blocks and a head

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    schedule = sys.argv[1]
    torch.set_num_threads(1)
    L.seed_everything(0)
    tokens = torch.randint(256, (20 * 32, 129))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy(schedule=schedule),
        callbacks=[StepProfiler(trace_dir=schedule)],  # says where the time goes
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), DataLoader(TensorDataset(tokens), batch_size=32))

# %% [markdown]
# A notebook is one process, and a pipeline takes several. So the script runs outside, as in a
# terminal. It starts its second process by itself.

# %% language="bash"
# python train_gpt.py 1f1b 2> messages.txt

# %% [markdown]
# Ten batches were timed. `StepProfiler` also computes which bubble the schedule alone would have,
# with the measured times of forwards and backwards. The rest of this lesson says where the bubble
# comes from, and what can be done against it.

# %%
import copy

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from IPython.display import display
from torch import Tensor, nn

from lightning_dist.engine.schedules import StageCosts, build_schedule, simulate
from lightning_dist.plotting import plot_timelines
from lightning_dist.plotting.chrome_trace import read_chrome_trace
from recipes.gpt import build_gpt

# %matplotlib inline

# %% [markdown]
# ## Why cut a model into stages?
#
# A model can be too large for one device. Its weights, their gradients and the optimizer's state
# must all fit. A *pipeline* puts the first layers on the first device and the next ones on the
# next. Between two stages only an activation travels forward, and its gradient travels back.
#
# The GPT is an `nn.Sequential`, so a cut is a slice.

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
# a slot of time, `F0` is the forward of batch 0, `B0` its backward, and a dot is a rank that waits.

# %%
print(build_schedule("gpipe", num_stages=4, num_microbatches=1).format_grid())

# %% [markdown]
# Only one rank works at a time. Four devices are no faster than one. The dots are the bubble.
#
# ## Micro-batches
#
# The cure is to cut the batch too. Cutting a batch does not change what is learned. The loss is a
# mean over the batch, so the gradient of the batch is the mean of the gradients of equal slices.
# This is the gradient accumulation that you may know from one device. We check it.


# %%
def mean_loss(network: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Computes the mean loss of a batch or of a slice of one."""
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
# The difference is the rounding of `float64` and nothing else. (A layer that mixes the samples of a
# batch, such as BatchNorm, is the exception.)
#
# ## Schedules
#
# In this package a schedule is plain data, so we can print it before anything runs. Here are two
# schedules for four stages and four micro-batches. A micro-batch is *in flight* from its forward to
# its backward. Meanwhile the rank keeps its activations.

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
# A grid gives each action one slot. A backward really takes about twice as long as a forward,
# because it computes two gradients: of the weights and of the inputs. The simulator takes such
# costs and gives a *timeline*: what each rank did, from when to when. The numbers in the boxes are
# the micro-batches.

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
# weights after each backward. There is a price: a batch that is under way meets weights that lack
# the updates of the batches just before it. They are *stale*. So that forward and backward of a
# batch use the same weights, a rank keeps the old version until the backward is done. The next
# lesson is about that.
#
# Here is one batch of `1f1b` above the middle of a long run of `pipedream`, in which the batches
# follow each other. In the lower rows the numbers are batches.

# %%
whole_batch = StageCosts.uniform(4, forward_seconds=0.040, backward_seconds=0.080)
endless = simulate(build_schedule("pipedream", num_stages=4, num_microbatches=20), whole_batch)
start = 8 * (0.040 + 0.080)  # long after the pipeline has filled
shown = endless.between(start, start + one_batch["1f1b"].makespan_seconds)
display(plot_timelines({"1f1b, one batch": one_batch["1f1b"], "pipedream, equally long": shown}))

# %% [markdown]
# The grey at both ends of `1f1b` is the price of the flush, paid for each batch. `pipedream` does
# not pay it.
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
    """Computes the closed form."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def simulated_bubble(name: str, num_stages: int, num_microbatches: int) -> float:
    """Simulates equal stages."""
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
# More micro-batches make the bubble smaller. But they are not free: each one has a cost of its own,
# small tensors use a device badly, and `gpipe` keeps them all in memory.
#
# `pipedream` follows the same formula if $m$ counts the batches between two moments at which the
# pipeline runs empty, for example before a validation. There are usually hundreds of them, so the
# bubble is almost nothing.
#
# ## The measured run
#
# So much for theory. The first run took the default of four micro-batches for each rank, eight.
# (They are fewer where each would have a single sample, or the model has BatchNorm.) Now the same
# script takes the other schedule.

# %% language="bash"
# python train_gpt.py pipedream 2> messages.txt

# %% [markdown]
# `StepProfiler` has written what each rank did when. Here is the middle of both runs.

# %%
measured = {name: read_chrome_trace(f"{name}/step_profile.json") for name in ("1f1b", "pipedream")}
middle = {}
for name, timeline in measured.items():
    start = timeline.start_seconds + timeline.makespan_seconds / 2
    middle[f"{name}, measured"] = timeline.between(start, start + 0.5)
display(plot_timelines(middle))
print(f"formula: {formula(2, 8):.1%} for 1f1b with 8 micro-batches, 0% for pipedream")

# %% [markdown]
# ## Why do they differ?
#
# - The **formula** assumes equal stages, and that nothing but forwards and backwards takes time.
#   For `pipedream` it gives zero: during the time that is shown the pipeline never runs empty.
# - The bubble that `StepProfiler` **predicts** knows how long each stage takes on average. If one
#   stage is heavier, the other one waits for it under every schedule.
# - The **measured** bubble contains all the rest. Tensors are copied from process to process.
#   Between two batches Lightning fetches data, logs and calls its hooks. No two forwards take the
#   same time: when one is late, the other rank waits, and under a schedule without slack that time
#   is lost.
#
# To be honest: this model is tiny, so these costs are large beside its computing. The batches are
# few. And if other programs share your cores, the numbers say as much about them as about the
# schedule, so they change from run to run. When the stages sleep for a fixed time instead of
# computing, as in `make bench`, the measured bubble comes close to the formula. So the formula is
# not wrong: it is what is left when everything else is perfect. Read a measured bubble together
# with its timeline.
#
# ## Try it
#
# - Give `PipelineStrategy` `num_microbatches=1`, then 16, under `"1f1b"`. What happens to the
#   formula, and what to the measurement?
# - Give it `partition=[2, 4]`. Which rank waits now, and does the prediction see it?
# - In `StageCosts.uniform`, give the transfers a cost with `transfer_seconds`. Which schedule
#   suffers most?
