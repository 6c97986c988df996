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

# %% [markdown]
# # Tensor parallelism and meshes
#
# Here is your LightningModule. To let several devices share each of its layers, add this to its
# Trainer:
#
# ```python
# strategy=TensorParallelStrategy()
# ```
#
# To combine this with other ways to share the work, say how many ranks each way gets:
#
# ```python
# strategy=MeshStrategy(dp_shard=2, tp=2)
# ```
#
# These words are all that the first run needs:
#
# - A *rank* is a process, and has a device.
# - Under *tensor parallelism* each rank has a part of each layer's weights and does a part of the
#   layer's work, for the same samples.
# - *Sequence parallelism* goes with it: between those layers, each rank has a part of the
#   positions.
# - A *mesh* numbers the ranks along several *axes*. Along `tp` ranks share layers, along `dp_shard`
#   they share the batch and shard the weights (the lesson before this one), along `pp` they are the
#   stages of a pipeline (the first lesson).
#
# You will train one model in five layouts with the same result, split a layer by hand in two ways,
# see what each axis sends, and conclude which axis belongs where. Two CPU cores are enough, and
# nothing needs the network. All numbers below are printed by code.

# %%
# %%writefile train_layouts.py
import contextlib
import json
import os
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import MeshStrategy, TensorParallelStrategy
from lightning_dist.callbacks import StepProfiler
from recipes.gpt import build_gpt


class LanguageModel(L.LightningModule):
    """Predicts the next byte."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = build_gpt(width=64, depth=2, num_heads=4)

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def samples():
    """Draws eight samples."""
    return torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(1))


STEPS = 4
LAYOUTS = {
    "tp=4": lambda: TensorParallelStrategy(),
    "tp=4, sequence": lambda: TensorParallelStrategy(sequence_parallel=True),
    "dp_shard=2, tp=2": lambda: MeshStrategy(dp_shard=2, tp=2),
    "pp=2, tp=2": lambda: MeshStrategy(pp=2, tp=2),
    "pp=2, dp_shard=2": lambda: MeshStrategy(pp=2, dp_shard=2),
}


def train(name):
    """Trains; returns what a rank holds."""
    strategy = LAYOUTS[name]()
    profiler = StepProfiler(active_steps=1, warmup_steps=1, trace_dir="profile")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        precision="64-true",  # to compare to the last digits
        callbacks=[profiler],
        max_epochs=STEPS,  # of one step each: all eight samples
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    replicas = 2 if "dp" in name else 1
    trainer.fit(LanguageModel(), DataLoader(TensorDataset(samples()), 8 // replicas))
    trainer.save_checkpoint(f"{name}.ckpt")
    held = profiler.report.records[0].memory.measured
    plan = str(strategy.describe()) if isinstance(strategy, TensorParallelStrategy) else ""
    return {
        "name": name,
        "parameters": held.parameters,
        "activations": held.activations,
        "plan": plan,
        "is_first": trainer.is_global_zero,
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in LAYOUTS:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            row = train(name)
        if row["is_first"]:
            with Path("layouts.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

# %% [markdown]
# A notebook is one process, and these layouts take four. So the script runs outside, as in a
# terminal. It starts the others by itself.

# %% language="bash"
# python train_layouts.py > report.txt 2> messages.txt

# %%
import json
from pathlib import Path

import lightning as L
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from train_layouts import STEPS, LanguageModel, samples

from lightning_dist import MeshStrategy
from lightning_dist.checkpoint import load_full
from lightning_dist.engine.planning.collectives import fastest
from lightning_dist.engine.planning.links import Link
from recipes.gpt import build_gpt

# %matplotlib inline
torch.set_num_threads(1)
rows = [json.loads(line) for line in Path("layouts.jsonl").read_text().splitlines()]

module = LanguageModel().double()
optimizer = module.configure_optimizers()
for _ in range(STEPS):
    optimizer.zero_grad()
    module.training_step((samples(),), 0).backward()
    optimizer.step()

for row in rows:
    trained = load_full(f"{row['name']}.ckpt")["state_dict"]
    apart = max(float((trained[n] - p).abs().max()) for n, p in module.state_dict().items())
    print(f"{row['name']:18} and one device: largest difference of a weight {apart:.0e}")
    assert apart < 1e-12

# %% [markdown]
# One model, five layouts, the same weights. Here is what the first of them did to the layers, as
# `strategy.describe()` shows it. Most are split `colwise`, by columns, or `rowwise`, by rows; both
# come next. Two are split over the vocabulary. `vocab` is for an embedding: each rank has the
# vectors of some tokens, gives zeros for the others, and an all-reduce adds up. `colwise_gather` is
# for the head: each rank computes the logits of some tokens, and an all-gather joins them.

# %%
print(rows[0]["plan"])

# %% [markdown]
# ## Two ways to split a layer
#
# A linear layer computes $y = x A$. Cut $A$ into two.
#
# - **By columns**, $A = [A_1, A_2]$: then $y = [x A_1, x A_2]$. Each rank needs all of $x$ and gets
#   a part of the *features* of $y$. Nothing has to be sent.
# - **By rows**: then $x$ must be cut too, and $y = x_1 A_1 + x_2 A_2$. Each rank has a *summand* of
#   all of $y$. An all-reduce adds them up.
#
# The trick of [Megatron-LM](https://arxiv.org/abs/1909.08053) is to do both, one after the other.
# The first layer's output is cut just as the second one needs its input, and what is between them,
# an activation function that treats each feature by itself, can stay cut. So a whole MLP costs a
# single all-reduce. Let us try, with two "ranks" in one process.

# %%
torch.manual_seed(0)
mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8, bias=False)).double()
x = torch.randn(4, 6, 8, dtype=torch.float64)  # samples, positions, features
up, down = mlp[0], mlp[2]

# nn.Linear keeps its weight transposed: its rows are output features.
by_columns = list(zip(up.weight.chunk(2, 0), up.bias.chunk(2), strict=True))
by_rows = down.weight.chunk(2, 1)

summands = []
for (weight, bias), second in zip(by_columns, by_rows, strict=True):
    part = F.gelu(F.linear(x, weight, bias))  # this rank's 16 of 32 features
    summands.append(F.linear(part, second))
apart = float((sum(summands) - mlp(x)).detach().abs().max())
print(f"two parts and the whole: largest difference {apart:.0e}; each rank had {tuple(part.shape)}")
assert apart < 1e-12

# %% [markdown]
# Attention is cut in the same way. Each *head* computes by itself, so the projections to queries,
# keys and values are cut by columns, between heads, and the projection after it by rows. So a block
# has two all-reduces in the forward, one for attention and one for the MLP. In the backward there
# are two more: each rank's part of the columns contributes a summand to the gradient of $x$.
#
# Norms, dropout and the sums of the residual path are between these parts. They need whole vectors,
# and each rank computes all of them, the same as the others do.
#
# ## Sequence parallelism
#
# That is a waste, and norms keep activations, too. But they treat each *position* by itself. And an
# all-reduce is a reduce-scatter and an all-gather (see the lesson on collectives). Between the two,
# each rank has the whole sum for a part of the positions. So let us put the norm there.

# %%
norm = nn.LayerNorm(8).double()
whole = norm(x + sum(summands))

received = [sum(parts) for parts in zip(*(s.chunk(2, 1) for s in summands), strict=True)]
normed = [norm(own + got) for own, got in zip(x.chunk(2, 1), received, strict=True)]
apart = float((torch.cat(normed, 1) - whole).detach().abs().max())
print(f"largest difference {apart:.0e}; each rank normed {tuple(normed[0].shape)}")
assert apart < 1e-12

# %% [markdown]
# `received` is the reduce-scatter, over positions, and `torch.cat` the all-gather that comes before
# the next layer. The bytes that travel are the same as before. What is saved is memory.
# `StepProfiler` has measured in the first run what a rank's forward keeps for its backward.

# %%
figure, axes = plt.subplots(figsize=(8, 2.8), layout="constrained")
names = [row["name"] for row in rows]
axes.barh(names, [row["activations"] / 2**20 for row in rows], color="#0072B2")
axes.invert_yaxis()
axes.set_xlabel("MiB of activations on the first rank")
axes.spines[["top", "right"]].set_visible(False)
plt.show()
for row in rows:
    weights, kept = row["parameters"] / 2**20, row["activations"] / 2**20
    print(f"{row['name']:18}{weights:5.2f} MiB of parameters, {kept:5.2f} MiB of activations")

# %% [markdown]
# In the first row, what is between the tensor-parallel parts is whole on each of the four ranks.
# With sequence parallelism, in the second, it is cut too. A stage keeps only what its own layers
# need, of the micro-batches that are in flight.
#
# ## What each axis sends
#
# Which layout is best depends on what travels, and over which link. `MeshStrategy` can tell without
# any other process: a *dry run* trains one step on tensors without values, and counts. Here is a
# larger GPT on 16 ranks, two along each axis. (`dp_replicate` is an axis of plain replicas.)


# %%
class LargeModel(LanguageModel):
    """The same module with 100 million parameters, which take no memory in a dry run."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.model = None

    def configure_model(self) -> None:
        """Builds the layers."""
        if self.model is None:
            self.model = build_gpt(width=1024, depth=8, num_heads=16)


mesh = MeshStrategy(pp=2, dp_replicate=2, dp_shard=2, tp=2)
tokens = torch.zeros(8, 1025, dtype=torch.long, device="meta")
summary = mesh.dry_run(LargeModel(), world_size=16, sample_batch=[tokens])
print(summary)

# %% [markdown]
# With the formulas of the lesson on collectives, bytes and counts become times: on a fast link, as
# between the GPUs of a host (200 GB/s), and on a network of 100 Gbit/s.

# %%
LINKS = {"in a host": Link(5e-6, 200e9), "between hosts": Link(20e-6, 12.5e9)}
AXES = ("tp", "dp_shard", "dp_replicate", "pp")
times = {axis: dict.fromkeys(LINKS, 0.0) for axis in AXES}
for traffic in summary.kinds[0].traffic:  # of the first stage's ranks
    for place, link in LINKS.items():
        each = traffic.num_bytes / traffic.count
        seconds = fastest(traffic.kind, 2, each, link).seconds(2, each, link)
        times[traffic.axes[0]][place] += traffic.count * seconds

figure, axes = plt.subplots(figsize=(8, 3), layout="constrained")
for place, offset, colour in (("in a host", -0.2, "#56B4E9"), ("between hosts", 0.2, "#D55E00")):
    bars = [1e3 * times[axis][place] for axis in AXES]
    axes.barh([row + offset for row in range(4)], bars, 0.38, color=colour, label=place)
axes.set_yticks(range(len(AXES)), AXES)
axes.invert_yaxis()
axes.set_xlabel("ms per step that a rank sends along the axis")
axes.spines[["top", "right"]].set_visible(False)
axes.legend(frameon=False)
plt.show()
for axis in AXES:
    found = "   ".join(f"{place}: {1e3 * s:6.2f} ms" for place, s in times[axis].items())
    print(f"{axis:13}", found)
assert max(AXES, key=lambda axis: times[axis]["between hosts"]) == "tp"
assert min(AXES, key=lambda axis: times[axis]["between hosts"]) == "pp"

# %% [markdown]
# From this follows the usual order:
#
# - **`tp` inside of a host.** It sends most, in each block, and nothing hides it: the next layer
#   needs the sum. Between hosts it may take longer than the work that it shares out.
# - **`dp_shard`** next. It sends the weights once per step (twice without stages) and the gradients
#   once, and most of it hides behind computing, as DDP's buckets do.
# - **`dp_replicate`** sends gradients once, and only those of its shard.
# - **`pp` between hosts.** It sends only an activation and its gradient at the cut. Its price is
#   the bubble.
#
# `MeshStrategy` therefore numbers ranks with `tp` innermost: neighbours, which share a host, share
# layers. Here is a mesh of eight ranks. Lines join ranks that talk to each other.

# %%
COLOURS = {"tp": "#D55E00", "dp_shard": "#E69F00", "pp": "#0072B2"}
places = {}
for rank in range(8):
    pp, dp_shard, tp = rank // 4, rank // 2 % 2, rank % 2
    places[rank] = (1.6 * dp_shard + tp * 0.9 + 0.25 * pp, -pp - 0.25 * tp)
figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
for axis, distance in (("tp", 1), ("dp_shard", 2), ("pp", 4)):
    pairs = [(rank, rank + distance) for rank in range(8) if rank // distance % 2 == 0]
    for index, (a, b) in enumerate(pairs):
        line = zip(places[a], places[b], strict=True)
        axes.plot(*line, color=COLOURS[axis], linewidth=3, label=None if index else axis, zorder=1)
axes.scatter(*zip(*places.values(), strict=True), s=500, color="white", edgecolor="black", zorder=2)
for rank, (x, y) in places.items():
    axes.text(x, y, str(rank), ha="center", va="center")
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
axes.margins(0.12)
axes.axis("off")
plt.show()

# %% [markdown]
# With two hosts of four ranks, ranks 0 to 3 are on the first. Only the lines of `pp` are between
# hosts.
#
# How many ranks along each axis? As few along `tp` as fit the model and its activations, never more
# than a host has. Then `dp_shard`, and stages when hosts are many. [choosing](../docs/choosing.md)
# has the bytes of each strategy, and a rule. [mesh](../docs/mesh.md) says what goes with what.
#
# ## Try it
#
# - Cut the MLP by rows first and by columns then. How many all-reduces are needed, and where?
# - Replace `nn.GELU()` by `nn.Softmax(-1)`. Why do the two parts no longer agree with the whole?
#   (The strategy tries its plan on a copy of each layer, and leaves whole what does not add up.)
# - In the dry run, give the batch 1 sample in place of 8. Which axis sends less, and which does
#   not?
# - Ask the dry run for `pp=4, dp_shard=4, tp=1` on 16 ranks. What does a rank hold, and send?
