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
# A pipeline is as fast as its slowest stage. This lesson shows how to find out which stage that is,
# and where to cut instead. You will
#
# 1. see in a picture what one slow stage does to all others;
# 2. find the best cut for given costs, and see why counting parameters misleads;
# 3. train a lopsided model on two processes, and read a report on its balance;
# 4. let the layers move while training runs, and compare the gain with what was promised.
#
# Two CPU cores are enough, and nothing needs the network. All numbers below are printed by code.

# %%
import pickle
import subprocess
import sys
import tempfile
from itertools import combinations
from pathlib import Path
from typing import Any

from IPython.display import display

from lightning_dist.engine.planning.partition import partition_layers
from lightning_dist.engine.schedules.registry import build_schedule
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.plotting import plot_balance, plot_timelines

# %matplotlib inline

# %% [markdown]
# ## One slow stage
#
# We simulate four stages under `1f1b`. First all are equal, then one has twice the work, and the
# others a little less, so that the sum is the same.

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
# Nobody can go faster than the first stage hands over. No schedule helps: under `pipedream`, which
# has no bubble of its own, the others would still wait for it.
#
# ## Where to cut
#
# A stage has layers that follow each other, so a partition is a list of counts: `[3, 1, 2]` means
# three layers on the first stage, one on the second, two on the third. Given what each layer costs,
# which one is best? Here are a layer that costs four times as much as the others, and all ways to
# cut in three.

# %%
layer_costs = [1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0, 1.0]


def slowest(cut: list[int]) -> float:
    """Gives the cost of the slowest stage."""
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
# ## Measure
#
# Here is a model that deceives a count of parameters: a large embedding, and blocks of which the
# last is four times as wide. `StageBalancer` times its layers while they train. This is a whole
# script; it is also what you would write for your own model.

# %%
SCRIPT = """
import pickle
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
    def __init__(self, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Lopsided(L.LightningModule):
    def __init__(self):
        super().__init__()
        blocks = [Block(4 * WIDTH * (4 if i == 5 else 1)) for i in range(6)]
        self.model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, 64))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    L.seed_everything(0)
    torch.set_num_threads(1)
    x = torch.randint(0, VOCABULARY, (60 * 16, 64))
    balancer = StageBalancer(every_n_steps=20, measured_steps=10, action=sys.argv[1])
    reports = []

    class Keep(L.Callback):
        def on_train_batch_end(self, *_):
            newest = balancer.balance
            if newest is not None and (not reports or reports[-1] is not newest):
                reports.append(newest)

    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=PipelineStrategy(schedule="1f1b", num_microbatches=4),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[balancer, Keep()],
    )
    trainer.fit(Lopsided(), DataLoader(TensorDataset(x, x % 64), 16))
    if trainer.is_global_zero:
        with open("reports.pickle", "wb") as file:
            pickle.dump(reports, file)
"""


def run(action: str) -> list[Any]:
    """Runs the script, and gives its reports."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "train.py").write_text(SCRIPT)
        done = subprocess.run(
            [sys.executable, "train.py", action],
            cwd=directory,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stdout + done.stderr)
        return pickle.loads(Path(directory, "reports.pickle").read_bytes())


before, after, *_ = run("rebalance")
print(before)

# %% [markdown]
# The same as a picture. Above, each layer with its time, today's cut and the better one; below,
# what each stage has to do.

# %%
display(plot_balance(before))

# %% [markdown]
# The cut by parameters gives the embedding a stage nearly for itself. The better cut is not by the
# slowest stage alone: the simulator says how long a whole step takes with either, filling and
# draining included, and that is the promised gain.
#
# ## Move the layers
#
# The script has run with `action="rebalance"`. So behind the report the pipeline was drained, each
# layer that changes its rank went there with its parameters, buffers and optimizer state, and
# training went on. The run afterwards is, bit for bit, the one that you would get by restarting
# from a checkpoint with the other partition. Here is the next report.

# %%
print(after)
print()
promised = before.gain
measured = 1.0 - after.measured_step_seconds / before.measured_step_seconds
print(f"cut: {list(before.cut)} -> {list(after.cut)}")
print(f"a step took {before.measured_step_seconds * 1e3:.1f} ms before")
print(f"        and {after.measured_step_seconds * 1e3:.1f} ms after")
print(f"saved, promised {promised:.0%}, measured {measured:.0%}")

# %% [markdown]
# The promise is the simulator's, with messages that cost nothing and ranks that do nothing else. So
# the measured gain is not quite that, and on a machine with other work it changes from run to run.
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
