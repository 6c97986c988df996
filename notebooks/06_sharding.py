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
# # Sharding
#
# Here is your LightningModule. To train it on several devices, each of which holds only a part of
# its weights, gradients and optimizer state, add this to its Trainer:
#
# ```python
# strategy=FSDPStrategy()
# ```
#
# These words are all that the first run needs:
#
# - A *rank* is a process, and has a device. As in plain data parallelism, each rank computes with
#   the whole model, on its own part of every batch.
# - A *shard* is a rank's part of a tensor: with $N$ ranks, an $N$th.
# - A *unit* is a module whose parameters are made whole together. This is done just before it
#   computes; afterwards only shards are left.
#
# You will
#
# 1. measure the memory of a rank under seven settings;
# 2. write the three ways to shard by hand, each in a few lines, and see that none changes what is
#    learned;
# 3. predict the memory that was measured;
# 4. choose units, and see what they cost in memory and time.
#
# Two CPU cores are enough, and nothing needs the network. All numbers below are printed by code.

# %%
# %%writefile train_sharded.py
import gc
import json
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DDPStrategy, FSDPStrategy
from lightning_dist.wrap import ByClass, ByName
from recipes.gpt import build_gpt


class LanguageModel(L.LightningModule):
    """Predicts the next byte."""

    def __init__(self):
        super().__init__()
        self.model = None

    def configure_model(self):
        """Builds the layers; under FSDPStrategy they never take the memory of the whole model."""
        if self.model is None:
            self.model = build_gpt(width=256, depth=4, num_heads=4)

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        (tokens,) = batch
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(strategy, **options):
    """Trains with two batches per update, so that gradients add up in between."""
    trainer = L.Trainer(
        accelerator="cpu",
        devices=4,
        strategy=strategy,
        accumulate_grad_batches=2,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    tokens = torch.randint(256, (4 * 4, 129))
    trainer.fit(LanguageModel(), DataLoader(TensorDataset(tokens), 1))
    return trainer.is_global_zero


def memory(field):
    """Reads what Linux says of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    torch.set_num_threads(1)
    # So that no setting pays for what is loaded only once.
    train(DDPStrategy(), limit_train_batches=1)
    zero_3 = {"shard": "parameters", "sync_every_microstep": True}
    for name, strategy in {
        "DDP": DDPStrategy(),
        "ZeRO-1": FSDPStrategy(shard="optimizer"),
        "ZeRO-2": FSDPStrategy(shard="gradients"),
        "ZeRO-3": FSDPStrategy(**zero_3),
        "ZeRO-3, one unit": FSDPStrategy(wrap=ByName(["model"]), **zero_3),
        "ZeRO-3, each Linear": FSDPStrategy(wrap=ByClass(["Linear"]), **zero_3),
        "ZeRO-3, checkpointing": FSDPStrategy(activation_checkpointing="full", **zero_3),
    }.items():
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        is_first = train(strategy)
        peak = memory("VmHWM") - before
        units = strategy.describe() if isinstance(strategy, FSDPStrategy) else None
        row = {"name": name, "peak": peak}
        if units is not None:
            row["whole"] = units.peak_whole_bytes
            row["units"] = [unit.num_bytes for unit in units.rows]
        if is_first:
            with Path("peaks.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

# %% [markdown]
# A notebook is one process, and sharding takes several: here four. So the script runs outside, as
# in a terminal. It starts the others by itself. The variable tells the C library to give memory
# back as soon as it is free, so that a peak is what was really needed.

# %% language="bash"
# MALLOC_MMAP_THRESHOLD_=131072 python train_sharded.py 2> messages.txt
# grep -h '^FSDP' messages.txt

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from lightning_dist.engine.planning.collectives import fastest
from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.planning.memory import TrainedPart, sharded
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.engine.profiling.meters.memory import ActivationMeter
from recipes.gpt import build_gpt

# %matplotlib inline
torch.set_num_threads(1)
MIB = 2**20
peaks = {row["name"]: row for row in map(json.loads, Path("peaks.jsonl").read_text().splitlines())}
for name, row in peaks.items():
    print(f"{name:22} {row['peak'] / MIB:6.1f} MiB at the peak")

# %% [markdown]
# The same model, the same batches, and half of the memory. Where has the rest gone?
#
# ## What a replica holds
#
# Training with Adam in `fp32` takes 16 bytes for each parameter: the weight, its gradient, and two
# running means that the optimizer keeps, of four bytes each. Under data parallelism each rank holds
# all of that, and all ranks hold the same. That is a waste: with $N$ ranks, $N - 1$ of $N$ bytes
# are copies.
#
# ZeRO ([Rajbhandari et al.](https://arxiv.org/abs/1910.02054)) takes the copies away, in three
# steps:
#
# - **ZeRO-1**: each rank keeps the *optimizer state* of its shard only. It updates its shard of the
#   weights, and then all gather the new weights.
# - **ZeRO-2**: each rank also keeps only its shard of the *gradients*. It needs no others for its
#   update.
# - **ZeRO-3**: each rank also keeps only its shard of the *parameters*, and gathers a unit's
#   weights when it needs them.
#
# So if a parameter's weight, gradient and optimizer state take $w$, $g$ and $o$ bytes, a rank holds
# $w + g + o/N$ bytes of it under ZeRO-1, $w + (g + o)/N$ under ZeRO-2 and $(w + g + o)/N$ under
# ZeRO-3. In `fp32` these are 4, 4 and 8 bytes. In mixed precision weights and gradients of two
# bytes compute, and the optimizer has a master weight and two means, of four bytes each: 2, 2 and
# 12. The sum is 16 again, but more of it is the optimizer's, so ZeRO-1 and ZeRO-2 save more.

# %%
SIZES = {"fp32": (4, 4, 8), "mixed precision": (2, 2, 12)}  # weight, gradient, optimizer state
ranks = [1, 2, 4, 8, 16, 32, 64]
figure, both = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
for axes, (precision, (w, g, o)) in zip(both, SIZES.items(), strict=True):
    axes.axhline(16, color="#000000", label="replicas: 16")
    for name, each, shared, colour in (
        ("ZeRO-1", w + g, o, "#E69F00"),
        ("ZeRO-2", w, g + o, "#009E73"),
        ("ZeRO-3", 0, w + g + o, "#0072B2"),
    ):
        found = [each + shared / n for n in ranks]
        axes.plot(ranks, found, "o-", color=colour, label=f"{name}: {each} + {shared}/N")
    axes.set_title(precision, loc="left", fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks, [str(n) for n in ranks])
    axes.set(xlabel="ranks", ylim=(0, 17))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.93))
both[0].set_ylabel("bytes per parameter")
plt.show()

# %% [markdown]
# With many ranks, in `fp32` ZeRO-1 takes a half of what replicas take, and ZeRO-2 a quarter; in
# mixed precision these are a quarter and an eighth. Only ZeRO-3 has no lower bound. A model of 70
# billion parameters needs 1,120 GB: only ZeRO-3 gets it onto 64 devices of 80 GB, with 17.5 GB
# each.
#
# ## By hand
#
# The lesson on collectives ended an all-reduce in two halves. A *reduce-scatter* leaves each rank
# with the sum of its part, and an *all-gather* gives all parts to all ranks. ZeRO is what fits in
# between. In the script below, a rank's shard is its part of one long vector of all weights.
#
# For ZeRO-3, one observation does all the work: *the backward of an all-gather is a
# reduce-scatter*. Each rank's shard has an effect on all ranks, so its gradient is the sum of what
# all ranks find. And to forget the whole weights after the forward, we let PyTorch compute the
# layer again in the backward. (FSDP does not compute it again. It gathers the weights anew and
# keeps the activations.)

# %%
# %%writefile zero_by_hand.py
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing import start_processes
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

RANKS, STEPS, SIZE = 4, 5, 32


def batch(step, rank):
    """Draws inputs and targets."""
    draws = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 16, SIZE, generator=draws, dtype=torch.float64)


def build():
    """Builds two layers."""
    torch.manual_seed(0)
    layers = [nn.Linear(SIZE, SIZE, bias=False), nn.Tanh(), nn.Linear(SIZE, SIZE, bias=False)]
    return nn.Sequential(*layers).double()


def one_device():
    """Trains with the samples of all ranks."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        x, y = torch.cat([batch(step, rank) for rank in range(RANKS)], dim=1)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def zero(level, rank):
    """Trains with shards of the optimizer state, and from level 2 on of the gradients."""
    model = build()
    weights = parameters_to_vector(model.parameters()).detach()
    mine = weights.chunk(RANKS)[rank].clone()
    optimizer = torch.optim.Adam([mine], lr=0.01)  # knows this shard only
    for step in range(STEPS):
        vector_to_parameters(weights, model.parameters())
        model.zero_grad()
        x, y = batch(step, rank)
        F.mse_loss(model(x), y).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()]) / RANKS
        if level == 1:
            dist.all_reduce(gradient)
            mine.grad = gradient.chunk(RANKS)[rank]
        else:
            mine.grad = torch.empty_like(mine)
            dist.reduce_scatter(mine.grad, list(gradient.chunk(RANKS)))
        optimizer.step()
        dist.all_gather(list(weights.chunk(RANKS)), mine)
    return weights


class Gather(torch.autograd.Function):
    """Gathers shards; the backward is a reduce-scatter."""

    @staticmethod
    def forward(ctx, shard):
        """Joins the shards of all ranks."""
        whole = shard.new_empty(RANKS * len(shard))
        dist.all_gather(list(whole.chunk(RANKS)), shard)
        return whole

    @staticmethod
    def backward(ctx, gradient):
        """Adds up the gradients of all ranks, and keeps this rank's shard."""
        mine = gradient.new_empty(len(gradient) // RANKS)
        dist.reduce_scatter(mine, list((gradient / RANKS).chunk(RANKS)))
        return mine


def layer(x, shard):
    """Makes a layer's weight whole, and uses it."""
    return F.linear(x, Gather.apply(shard).view(SIZE, SIZE))


def zero_3(rank):
    """Trains with shards of everything."""
    shards = [p.detach().flatten().chunk(RANKS)[rank].clone() for p in build().parameters()]
    shards = [shard.requires_grad_() for shard in shards]
    optimizer = torch.optim.Adam(shards, lr=0.01)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        h = torch.tanh(checkpoint(layer, x, shards[0], use_reentrant=False))
        F.mse_loss(checkpoint(layer, h, shards[1], use_reentrant=False), y).backward()
        optimizer.step()
    return torch.cat([Gather.apply(shard).detach() for shard in shards])


def compare(rank):
    """Joins the ranks, and compares the ways with one device."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{Path('meeting').resolve()}", None, RANKS, rank)
    expected = one_device()
    for name, found in {
        "ZeRO-1": zero(1, rank),
        "ZeRO-2": zero(2, rank),
        "ZeRO-3": zero_3(rank),
    }.items():
        apart = float((found - expected).abs().max())
        assert apart < 1e-12
        if rank == 0:
            print(f"{name} and one device: largest difference of a weight {apart:.0e}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    Path("meeting").unlink(missing_ok=True)
    start_processes(compare, nprocs=RANKS, start_method="fork")

# %% language="bash"
# python zero_by_hand.py

# %% [markdown]
# Sharding changes where numbers are, not what they are. (Adam treats each weight by itself. An
# optimizer that looks at a whole matrix, or clipping by the norm of all gradients, needs a further
# collective.)
#
# ## Measured beside the formula
#
# Now for the memory of the first run, in `fp32`. `FSDPStrategy` holds more than the formulas above
# say, and what comes on top has names. Let $P$ be the bytes of all parameters.
#
# - FSDP always keeps its shard of the parameters, $P/N$. Under ZeRO-1 and ZeRO-2 the gathered
#   parameters, $P$, come on top from forward to backward. So a parameter takes $8 + 12/N$ bytes
#   under ZeRO-1 and $4 + 16/N$ under ZeRO-2, $4/N$ more than above. In mixed precision the gathered
#   parameters would be the copies of two bytes, and the shard would be the master weights.
# - Under ZeRO-1 gradients add up whole until the update is due: $P$. That is its advantage, too:
#   they travel once per update. The script takes two batches per update. With one, nothing adds up,
#   and ZeRO-1 and ZeRO-2 hold the same.
# - DDP holds $P$ more than 16 bytes per parameter, for the buckets in which accumulated gradients
#   travel.
# - Under ZeRO-3 two units are whole at a time: one computes, and the next one is being gathered. So
#   is the *root*, the unit of what no other unit has (here the embedding and the head). To them
#   come the whole gradients of a unit, until they are scattered.
# - All hold *activations*, which the forward keeps for the backward.
#
# We count these, and put what was measured beside.

# %%
model = build_gpt(width=256, depth=4, num_heads=4)
whole = sum(p.nbytes for p in model.parameters())
tokens = torch.randint(256, (1, 129))
with ActivationMeter(model.parameters()) as meter:
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
activations = meter.peak_bytes
N = 4
KINDS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer state": "#009E73",
    "whole units": "#56B4E9",
    "buffers": "#CC79A7",
    "activations": "#BBBBBB",
}


def zero_3_parts(row: dict) -> list[float]:
    """Asks the package's planner."""
    part = TrainedPart(whole, activations)
    found = sharded(part, N, row["whole"], max(row["units"]))
    held = [found.parameters, found.gradients, found.optimizer_state]
    return [*held, found.unsharded, found.buffers, found.activations]


share = whole / N
counted = {
    "DDP": [whole, whole, 2 * whole, 0, whole, activations],
    "ZeRO-1": [share, whole, 2 * share, whole, 0, activations],
    "ZeRO-2": [share, share, 2 * share, whole, 0, activations],
    "ZeRO-3": zero_3_parts(peaks["ZeRO-3"]),
}

figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for place, (name, sizes) in enumerate(counted.items()):
    left = 0.0
    for (kind, colour), size in zip(KINDS.items(), sizes, strict=True):
        label = kind if place == 0 else None
        axes.barh(place, size / MIB, left=left / MIB, color=colour, label=label)
        left += size
    measured = peaks[name]["peak"]
    axes.plot([measured / MIB] * 2, [place - 0.45, place + 0.45], color="black", linewidth=2)
    ratio, total = measured / sum(sizes), sum(sizes) / MIB
    print(f"{name:7} counted {total:6.1f} MiB, measured {measured / MIB:6.1f}: x {ratio:.2f}")
axes.set_yticks(range(len(counted)), list(counted))
axes.invert_yaxis()
axes.set_xlabel("MiB; the black line is what was measured")
axes.legend(frameon=False, loc="lower right")
plt.show()

# %% [markdown]
# For shards the count may be too low, here by up to 16 %: it leaves out the buffers of collectives,
# from which gathered parameters are copied. `make bench-memory` measures a model of four times the
# size, where it is off by 1 to 5 %: [choosing](../docs/choosing.md#what-a-rank-holds) has the
# figures.
#
# Sharding does not come for nothing. What travels per update, in multiples of $V (N - 1) / N$,
# where $V$ is the bytes of all parameters:
#
# - data parallelism: 2, an all-reduce of the gradients;
# - ZeRO-1 and ZeRO-2: 2, a reduce-scatter of gradients and an all-gather of parameters. They save
#   memory without further traffic. (With two batches per update, parameters are gathered for each,
#   and ZeRO-2 also sends gradients for each.)
# - ZeRO-3: 3, since parameters are gathered for the forward, and again for the backward. (FSDP
#   gathers those of the root only once: they stay whole, as the backward begins where the forward
#   ends.)
#
# ## Which units?
#
# Under ZeRO-3 a unit is whole at a time. With a single unit the whole model is. With small units
# there are many messages, and each costs its latency. The default, `wrap="auto"`, takes the block
# that the model repeats. *Wrap policies* choose others: `ByClass(["Linear"])`, `ByName(["model"])`,
# `BySize(1_000_000)`.
#
# For three choices, here are the memory that was measured and the time that the collectives of a
# step would take on a link of 100 Gbit/s with a latency of 20 microseconds, by the formulas of the
# lesson on collectives.

# %%
LINK = Link(latency_seconds=20e-6, bytes_per_second=12.5e9)


def seconds_per_step(root: int, others: list[int]) -> float:
    """Adds up two all-gathers of each unit, of the root one, and a reduce-scatter of each."""
    sent = [(MessageKind.ALL_GATHER, size) for size in [root, *others, *others]]
    sent += [(MessageKind.REDUCE_SCATTER, size) for size in [root, *others]]
    return sum(fastest(kind, N, v, LINK).seconds(N, v, LINK) for kind, v in sent if v)


print(f"{'':20}{'units':>6}{'whole at a time':>18}{'measured peak':>16}{'collectives':>14}")
for name in ("ZeRO-3, one unit", "ZeRO-3", "ZeRO-3, each Linear"):
    row = peaks[name]
    root, *others = row["units"]
    sizes = f"{row['whole'] / MIB:14.1f} MiB{row['peak'] / MIB:12.1f} MiB"
    seconds = seconds_per_step(root, others)
    print(f"{name:20}{bool(root) + len(others):6}{sizes}{1e3 * seconds:11.1f} ms")

# %% [markdown]
# A single unit is worst in memory, and its collectives are all exposed: nothing can be computed
# while everything is being gathered. With blocks, the next block is gathered while one computes. So
# take units that compute for longer than the next one travels, and are small beside the shards. A
# block of a transformer usually is both.
#
# ## What sharding leaves
#
# Activations belong to a rank's own samples, so no copy of them is anywhere else. Sharding does not
# make them smaller, and in long runs with long sequences they are the largest part. What helps is
# not to keep them: with *activation checkpointing* a unit keeps its input only, and computes the
# rest again in the backward.

# %%
print(f"activations of a whole forward: {activations / MIB:.1f} MiB")
for name in ("ZeRO-3", "ZeRO-3, checkpointing"):
    print(f"{name:22} {peaks[name]['peak'] / MIB:5.1f} MiB at the peak")

# %% [markdown]
# The peak falls by less than the activations: it is now at another moment, in the backward. Two
# more arguments of `FSDPStrategy` are worth knowing from here:
#
# - `shard_size=8`: with more ranks than that, shards lie on 8 ranks, and there are several replicas
#   of them. Units are then gathered inside of a host, where links are fast, and only gradients of
#   shards travel between hosts. This is called HSDP.
# - `offload="cpu"` keeps shards in the host's memory, on a GPU.
#
# [fsdp](../docs/fsdp.md) has them all.
#
# ## Try it
#
# - Set `accumulate_grad_batches` to 1. Which two settings hold the same now?
# - Leave out `sync_every_microstep`. What does ZeRO-3 hold between the two batches?
# - Take `torch.optim.SGD` without momentum. Is ZeRO-1 still worth it?
# - In `zero_by_hand.py`, leave out `checkpoint`. The weights stay the same; what has become of
#   ZeRO-3?
