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
# # Balancing stages
#
# Here is your LightningModule, trained in a pipeline. A *rank* is a process, and a *stage* is the
# part of the layers that a rank has. To find out which stage is slow and where to cut instead, add
# this to its Trainer:
#
# ```python
# callbacks=[StageBalancer()]
# ```
#
# With `StageBalancer(action="rebalance")` the layers also move to where they should be, while
# training runs. You will
#
# 1. read a report on the balance of a lopsided model;
# 2. see in a picture what one slow stage does to all others;
# 3. find the best cut for given costs, and see why counting parameters misleads;
# 4. let the layers move, and compare the gain with what was promised.
#
# Two CPU cores are enough, and nothing needs the network. All numbers below are printed by code.

# %%
# %%writefile train_lopsided.py
import sys

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import StageBalancer

WIDTH, VOCABULARY = 128, 8192


class Block(nn.Module):
    """A block of a transformer, without its attention."""

    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        """Maps to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Lopsided(L.LightningModule):
    """A large embedding, and blocks of which the last is four times as wide."""

    def __init__(self):
        super().__init__()
        blocks = [Block(4 * WIDTH * (4 if i == 5 else 1)) for i in range(6)]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, 64))

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        x, y = batch
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(0)
    torch.set_num_threads(1)
    x = torch.randint(0, VOCABULARY, (45 * 16, 64))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy(schedule="1f1b", num_microbatches=4),
        max_epochs=1,
        callbacks=[StageBalancer(every_n_steps=20, action=sys.argv[1])],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Lopsided(), DataLoader(TensorDataset(x, x % 64), 16))

# %% [markdown]
# A notebook is one process, and a pipeline takes several. So the script runs outside, as in a
# terminal. It starts its second process by itself. The callback looks at some batches now and then,
# and reports. In the report *forward* and *backward* are of one micro-batch, a slice of the batch.

# %% language="bash"
# python train_lopsided.py report 2> messages.txt

# %% [markdown]
# The model deceives a count of parameters, by which it was cut. At the end of the run the callback
# has also drawn the report. Above, each layer with its time, today's cut and the better one; below,
# what each stage has to do.

# %%
from itertools import combinations

from IPython.display import Image, display

from lightning_dist.engine.planning import partition_layers
from lightning_dist.engine.schedules import StageCosts, build_schedule, simulate
from lightning_dist.plotting import plot_timelines

# %matplotlib inline
display(Image("lightning_logs/version_0/stage_balance.png", width=800))

# %% [markdown]
# The cut by parameters gives the embedding a stage nearly for itself. The better cut is not chosen
# by the slowest stage alone. A simulator computes how long a whole step takes with each of the two;
# the difference is the promised gain.
#
# ## One slow stage
#
# Why does one stage matter so much? We simulate four of them under `1f1b`. First all are equal,
# then one has twice the work, and the others a little less, so that the sum is the same.

# %%
schedule = build_schedule("1f1b", num_stages=4, num_microbatches=8)
equal = StageCosts.uniform(4, forward_seconds=0.010, backward_seconds=0.020)
forward = [0.020, 0.020 / 3, 0.020 / 3, 0.020 / 3]
lopsided = StageCosts(tuple(forward), tuple(2 * seconds for seconds in forward))

timelines = {
    "four equal stages": simulate(schedule, equal),
    "the first has twice the work": simulate(schedule, lopsided),
}
display(plot_timelines(timelines))
for name, timeline in timelines.items():
    print(f"{name:30} {timeline.makespan_seconds * 1e3:.0f} ms for the same work")

# %% [markdown]
# No stage can work faster than the first one delivers. No schedule helps: under `pipedream`, which
# lets no stage wait for the end of a batch, the others would still wait for the first one.
#
# ## Where to cut
#
# A stage has layers that follow each other, so a partition is a list of counts: `[3, 1, 2]` means
# three layers on the first stage, one on the second, two on the third. Given what each layer costs,
# which one is best? Here is a model in which one layer costs four times as much as each other one.
# We try all ways to cut it in three.

# %%
layer_costs = [1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0]


def slowest(cut: list[int]) -> float:
    """Computes the cost of the slowest stage."""
    ends = [sum(cut[: stage + 1]) for stage in range(len(cut))]
    return max(sum(layer_costs[end - count : end]) for end, count in zip(ends, cut, strict=True))


count = len(layer_costs)
cuts = [[a, b - a, count - b] for a, b in combinations(range(1, count), 2)]
by_hand = min(cuts, key=slowest)
found = partition_layers(layer_costs, 3)
print(f"all {len(cuts)} cuts: the best is {by_hand}, its slowest stage costs {slowest(by_hand)}")
print(f"partition_layers: {list(found)}, its slowest stage costs {slowest(list(found))}")
print(f"as many layers for each, [3, 3, 2]: {slowest([3, 3, 2])}")

# %% [markdown]
# `partition_layers` does not try all cuts (a thousand layers on 64 stages have more than there are
# atoms), but it finds one that is as good as the best.
#
# So the question is what a layer costs. `partition="parameters"`, the default, takes the number of
# parameters. That is a good guess for blocks of one kind. It is a bad one for an embedding, which
# is large and only looked up, and for attention over long sequences, which is small and slow.
#
# ## Move the layers
#
# Now the same script runs with `action="rebalance"`. After the first report the pipeline is
# drained. Each layer that changes its rank takes its parameters, buffers and optimizer state along,
# and training goes on. The run afterwards is, bit for bit, the one that you would get by restarting
# from a checkpoint with the other partition.

# %% language="bash"
# python train_lopsided.py rebalance 2> messages.txt

# %% [markdown]
# Each report ends with how long a step really took. Compare the second one with the first, and with
# the promise. The promise is the simulator's, with messages that cost nothing and ranks that do
# nothing else. So the measured gain is not quite that, and on a machine with other work it changes
# from run to run.
#
# With `action="report"` nothing moves, and you may write the better cut into your script as
# `PipelineStrategy(partition=[...])`. `PipelineStrategy(partition="profile")` does the same before
# the first step: it runs the first batch a few times, forgets what that has changed, and moves the
# layers. `strategy.repartition([...])` moves them whenever you like.
#
# ## Try it
#
# - Let the wide block be the first one. Which cut is best now?
# - Set `num_microbatches` to 16. Does the promised gain become larger or smaller, and why?
# - Use `schedule="pipedream"`. What is the promised gain there?
