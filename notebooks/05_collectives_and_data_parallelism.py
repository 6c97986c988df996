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
# # Collectives and data parallelism
#
# Here is your LightningModule. To train it on two devices, each of which takes half of every batch,
# add this to its Trainer:
#
# ```python
# strategy=DDPStrategy()
# ```
#
# These words are all that the first run needs:
#
# - A *rank* is a process, and has a device. A *replica* is a copy of the whole model. Each rank has
#   one.
# - A *collective* is a communication in which all ranks take part. An *all-reduce* is one: each
#   rank gives a tensor, and each receives the sum of all of them.
#
# *Data parallelism* is one all-reduce of the gradients per step. So this lesson is about the
# all-reduce: you will
#
# 1. write three of them, with nothing but sending and receiving, and compare their times with a
#    formula;
# 2. see what a replica does while gradients travel;
# 3. choose a learning rate for the larger batch;
# 4. let no rank wait for another one, and see what that costs.
#
# Two CPU cores are enough, and nothing needs the network. All numbers below are printed by code.

# %%
# %%writefile train_digits.py
import lightning as L
import torch
import torch.nn.functional as F
from digits import build, load_samples
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DDPStrategy


class Digits(L.LightningModule):
    """Reads scanned digits."""

    def __init__(self):
        super().__init__()
        self.model = build()

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(),
        precision="64-true",  # to compare to the last digits
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # Each of the two ranks takes 32 samples, so that a step has 64.
    trainer.fit(Digits(), DataLoader(TensorDataset(*load_samples()), 32))
    trainer.save_checkpoint("trained.ckpt")

# %%
# %%writefile digits.py
import torch
from sklearn.datasets import load_digits
from torch import nn


def build(seed=0):
    """Builds a network."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)).double()


def load_samples():
    """Loads 1,792 of the digits: a multiple of all batch sizes of this lesson."""
    digits = load_digits()
    images = torch.tensor(digits.data[:1792] / 16.0 - 0.3)
    return images, torch.tensor(digits.target[:1792])


# %% [markdown]
# A notebook is one process, and replicas take several. So the script runs outside, as in a
# terminal. It starts its second process by itself.

# %% language="bash"
# python train_digits.py 2> messages.txt
# grep '^DDP' messages.txt

# %% [markdown]
# What must come out? The loss is a mean over the batch, so the gradient of the whole batch is the
# mean of the gradients of its halves. The sum that an all-reduce gives, divided by the number of
# ranks, is that mean. Two replicas with 32 samples each must therefore learn what a plain loop on
# one device learns from 64.

# %%
import json
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from digits import build, load_samples
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_dist.checkpoint import load_full
from lightning_dist.engine.planning.collectives import (
    ALGORITHMS,
    least_seconds_of_all_reduce,
    winners,
)
from lightning_dist.engine.planning.links import Link
from lightning_dist.engine.planning.traffic import MessageKind

# %matplotlib inline
torch.set_num_threads(1)
images, labels = load_samples()

model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    # Lightning's Trainer shares the samples out with this sampler.
    shares = [DistributedSampler(range(1792), num_replicas=2, rank=rank) for rank in range(2)]
    for sampler in shares:
        sampler.set_epoch(epoch)
    order = torch.tensor([list(sampler) for sampler in shares])
    for picks in order.split(32, dim=1):
        optimizer.zero_grad()
        F.cross_entropy(model(images[picks.flatten()]), labels[picks.flatten()]).backward()
        optimizer.step()

trained = load_full("trained.ckpt")["state_dict"]
apart = max(float((trained[f"model.{n}"] - p).abs().max()) for n, p in model.state_dict().items())
print(f"two replicas and one device: largest difference of a weight {apart:.0e}")
assert apart < 1e-12

# %% [markdown]
# ## What a message costs
#
# An all-reduce is made of messages. A message of $V$ bytes takes
#
# $$\alpha + V / \beta$$
#
# seconds. The *latency* $\alpha$ is what even an empty message takes, and the *bandwidth* $\beta$
# is how many bytes follow in a second. A network card sends one message at a time and receives one
# at a time, and can do both at once.
#
# All ranks of this lesson share one machine. No network is between them, so we make one: messages
# really travel between processes, and each rank then waits until the formula's time is over. Here
# $\alpha$ is 5 ms and $\beta$ is 50 MB/s.

# %%
# %%writefile slow_network.py
import time

import torch
import torch.distributed as dist

LATENCY, BANDWIDTH = 5e-3, 50e6  # seconds, bytes per second


class Card:
    """A rank's network card: sends one message at a time, and receives one at a time."""

    def __init__(self, latency=LATENCY, bandwidth=BANDWIDTH):
        self.latency, self.bandwidth = latency, bandwidth
        self.sends_until = self.receives_until = 0.0
        self.sent_bytes, self.work = 0, []

    def send(self, tensor, to):
        """Begins to send, and does not wait; the message says when it leaves."""
        leaves = max(time.monotonic(), self.sends_until)
        self.sends_until = leaves + self.latency + tensor.nbytes / self.bandwidth
        self.sent_bytes += tensor.nbytes
        when = torch.tensor([leaves], dtype=torch.float64)
        self.work += [(dist.isend(sent, to), sent) for sent in (when, tensor.clone())]

    def receive(self, tensor, source):
        """Waits for a message, and until it could have come over a real link."""
        leaves = torch.zeros(1, dtype=torch.float64)
        dist.recv(leaves, source)
        dist.recv(tensor, source)
        begins = max(float(leaves), self.receives_until)
        self.receives_until = begins + self.latency + tensor.nbytes / self.bandwidth
        time.sleep(max(0.0, self.receives_until - time.monotonic()))

    def finish(self):
        """Waits until all that was sent has left."""
        for work, _ in self.work:
            work.wait()
        self.work.clear()
        time.sleep(max(0.0, self.sends_until - time.monotonic()))


# %% [markdown]
# ## Three ways to add up
#
# **Naive.** All ranks send their tensor to rank 0, which adds up and sends the sum to all. Rank 0's
# card carries everything, one message after another.
#
# **Tree.** In the first round, rank 1 sends to rank 0, 3 to 2, 5 to 4 and 7 to 6. In the second, 2
# sends to 0 and 6 to 4; in the third, 4 to 0. The sum goes back on the same way. Eight ranks need
# three rounds each way, not seven.
#
# **Ring.** The tensor is cut into as many parts as there are ranks. Each part goes around the ring
# and collects summands. Then each sum goes around once more. All cards are busy all the time, with
# small messages.

# %%
# %%writefile all_reduces.py
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from slow_network import Card
from torch.multiprocessing import start_processes


def naive(x, card):
    """Adds up on rank 0, which sends the sum to all."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        card.send(x, 0)
        card.receive(x, 0)
        return
    other = torch.empty_like(x)
    for source in range(1, size):
        card.receive(other, source)
        x += other
    for target in range(1, size):
        card.send(x, target)


def tree(x, card):
    """Adds up in pairs, then in pairs of pairs; the sum goes back on the same way."""
    rank, size = dist.get_rank(), dist.get_world_size()
    other = torch.empty_like(x)
    reaches = [2**level for level in range((size - 1).bit_length())]
    for reach in reaches:
        if rank % (2 * reach) == reach:
            card.send(x, rank - reach)
        elif rank % (2 * reach) == 0 and rank + reach < size:
            card.receive(other, rank + reach)
            x += other
    for reach in reversed(reaches):
        if rank % (2 * reach) == reach:
            card.receive(x, rank - reach)
        elif rank % (2 * reach) == 0 and rank + reach < size:
            card.send(x, rank + reach)


def reduce_scatter(parts, card):
    """Leaves the sum of part r + 1 on rank r."""
    rank, size = dist.get_rank(), dist.get_world_size()
    other = torch.empty_like(parts[0])
    for step in range(size - 1):
        card.send(parts[(rank - step) % size], (rank + 1) % size)
        card.receive(other, (rank - 1) % size)
        parts[(rank - step - 1) % size].add_(other)


def all_gather(parts, card):
    """Sends the part r + 1 of each rank r to all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(size - 1):
        card.send(parts[(rank + 1 - step) % size], (rank + 1) % size)
        card.receive(parts[(rank - step) % size], (rank - 1) % size)


def ring(x, card):
    """Adds up each part on another rank, then sends all sums around."""
    parts = x.chunk(dist.get_world_size())
    reduce_scatter(parts, card)
    all_gather(parts, card)


def start(rank, size, function, *arguments):
    """Joins the ranks of a group, and calls a function on each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{Path('meeting').resolve()}", None, size, rank)
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(size, function, *arguments):
    """Calls a function on some new processes, which torch copies from this one."""
    Path("meeting").unlink(missing_ok=True)
    arguments = (size, function, *arguments)
    start_processes(start, arguments, nprocs=size, start_method="fork")


def time_once(algorithm, kib, limits):
    """Returns the seconds and sent bytes of the rank that takes and sends most."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, card = torch.full((kib * 256,), rank + 1.0), Card(*limits)
    dist.barrier()
    begin = time.monotonic()
    algorithm(x, card)
    card.finish()
    most = torch.tensor([time.monotonic() - begin, card.sent_bytes], dtype=torch.float64)
    assert bool((x == size * (size + 1) / 2).all())  # 1 + 2 + ..., on each rank
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.tolist()


def measure(networks):
    """Times the algorithms, and appends the better of two times to a file."""
    size = dist.get_world_size()
    for algorithm in (naive, tree, ring):
        time_once(algorithm, 4, (0.0, float("inf")))  # connects the ranks
        for network, limits in networks.items():
            for kib in (4, 64, 512, 2048) if size == 4 else (2048,):
                seconds, sent = min(time_once(algorithm, kib, limits) for _ in range(2))
                row = [network, size, kib, algorithm.__name__, seconds, sent]
                if dist.get_rank() == 0:
                    with Path("times.jsonl").open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    Path("times.jsonl").unlink(missing_ok=True)
    for size in (2, 4, 8):
        on_ranks(size, measure, {"slow": (), "none": (0.0, float("inf"))})

# %% language="bash"
# python all_reduces.py

# %% [markdown]
# All three gave each rank the sum; the script checks that. Now their times, as dots, beside the
# formulas that the package has for them, as lines.

# %%
LINK = Link(latency_seconds=5e-3, bytes_per_second=50e6)
FORMULAS = {a.name: a for a in ALGORITHMS[MessageKind.ALL_REDUCE]}
COLOURS = {"naive": "#D55E00", "tree": "#E69F00", "ring": "#0072B2"}
rows = [json.loads(line) for line in Path("times.jsonl").read_text().splitlines()]
times = {tuple(row[:4]): row[4] for row in rows}

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for name, colour in COLOURS.items():
    for axes, shown in (
        (left, [(4, kib) for kib in (4, 64, 512, 2048)]),
        (right, [(size, 2048) for size in (2, 4, 8)]),
    ):
        x = [kib if axes is left else size for size, kib in shown]
        expected = [FORMULAS[name].seconds(size, kib * 1024, LINK) for size, kib in shown]
        found = [times["slow", size, kib, name] for size, kib in shown]
        axes.plot(x, [1e3 * s for s in expected], color=colour, label=name)
        axes.plot(x, [1e3 * s for s in found], "o", color=colour)
left.set(xscale="log", yscale="log", xlabel="KiB of the tensor", ylabel="ms of an all-reduce")
left.set_title("4 ranks", loc="left", fontsize=11)
right.set(xlabel="ranks", xticks=(2, 4, 8), ylim=(0, None))
right.set_title("2 MiB", loc="left", fontsize=11)
for axes in (left, right):
    axes.grid(alpha=0.3)
left.legend(frameon=False)
plt.show()

off = [
    seconds / FORMULAS[name].seconds(size, kib * 1024, LINK) - 1
    for (network, size, kib, name), seconds in times.items()
    if network == "slow"
]
print(f"measured over formula: between {min(off):+.0%} and {max(off):+.0%}")

# %% [markdown]
# On the left: a small tensor costs little but latency, and the tree, which has the fewest rounds,
# is first. A large one costs little but bytes, and the ring is first. On the right: the time of the
# naive way grows with the number of ranks $p$, that of the tree with its logarithm. That of the
# ring has two parts. Its bytes hardly grow: they take $2 V / \beta$ at most, on any number of
# ranks. Its $2 (p - 1)$ latencies grow as those of the naive way do, and here, with 5 ms each, they
# are about half of its time on eight ranks. So a ring is for large tensors on not too many ranks.
#
# From which size on which one wins can be computed, and so can what comes on more ranks than we
# have. The package knows two more algorithms, in which ranks exchange with partners at a distance
# of 1, 2, 4, and so on. They need few rounds, and like the tree they are at their best if the
# number of ranks is a power of two.

# %%
print("ms of an all-reduce of 2 MiB, by the formulas")
for size in (8, 64, 1024):
    found = {name: 1e3 * a.seconds(size, 2 * 2**20, LINK) for name, a in FORMULAS.items()}
    print(f"{size:4} ranks:", ", ".join(f"{name} {ms:.0f}" for name, ms in found.items()))
print("the fastest")
for size in (4, 6, 48):
    found = winners(MessageKind.ALL_REDUCE, size, LINK)
    print(f"{size:3} ranks:", "; ".join(f"{a.name} from {v / 1024:.0f} KiB" for v, a in found))

# %% [markdown]
# ## The ring's two halves
#
# The code of the ring is two collectives of their own.
#
# - After the *reduce-scatter* each rank has the sum of one part.
# - The *all-gather* gives all ranks all parts.
#
# So *reduce-scatter and all-gather together are an all-reduce*. Each half sends $p - 1$ messages of
# $V / p$ bytes from each of $p$ ranks. In bytes this is as good as it can be. To know the sum, each
# rank must receive as many bytes as it lacks. Together, the cards carry at least $2 (p - 1) V$
# bytes: each part has $p - 1$ summands to bring in and $p - 1$ sums to bring out. In a ring the
# cards share them equally, so an all-reduce takes $2 V (p - 1) / (p \beta)$ seconds at least. That
# bound leaves out the latency of its messages, of which a ring has the most: $2 (p - 1)$, one after
# another.
#
# Why would one want only a half? Between the two, a rank could update its part of the weights, and
# gather the new weights in place of the gradients. It then needs the optimizer's state of its part
# only. That is the next lesson, on sharding.

# %%
bytes_sent = {(row[1], row[3]): row[5] for row in rows if row[0] == "slow" and row[2] == 2048}
print("MiB that the busiest card sends for a tensor of 2 MiB")
for size in (2, 4, 8):
    sent = {name: bytes_sent[size, name] / 2**20 for name in COLOURS}
    assert sent["ring"] == 2 * 2 * (size - 1) / size
    print(f"{size} ranks: ", "  ".join(f"{name} {mib:4.1f}" for name, mib in sent.items()))
least = least_seconds_of_all_reduce(8, 2 * 2**20, LINK)
print(f"the bound for 8 ranks: {1e3 * least:.0f} ms;", end=" ")
print(f"the ring took {1e3 * times['slow', 8, 2048, 'ring']:.0f} ms,", end=" ")
print(f"{1e3 * 14 * LINK.latency_seconds:.0f} ms of them the latency of 14 messages")

# %% [markdown]
# The same runs without the waiting show something else.

# %%
for size in (2, 4, 8):
    found = {name: 1e3 * times["none", size, 2048, name] for name in COLOURS}
    print(f"{size} ranks: ", "  ".join(f"{name} {ms:3.0f} ms" for name, ms in found.items()))

# %% [markdown]
# Here the ring wins little or nothing, and on eight ranks it loses. All three move $2 (p - 1) V$
# bytes in all, and here two cores move them, for all ranks. The ring does it in $2 p (p - 1)$
# messages, the others in $2 (p - 1)$: on eight ranks 112 and 14. Each of them wakes a process, and
# the processes share the cores. The formula counts what *one card* carries, and assumes that each
# rank has a card and a processor of its own. So a test on one machine says little about a network.
# `make bench-network` measures over links whose limits are real; its figures are in
# [benchmarks](../docs/benchmarks.md#a-limited-link).
#
# ## What DDP's buckets hide
#
# A backward computes the gradients of the last layer first. So why wait for all of them? DDP puts
# gradients into *buckets*. When the last gradient of a bucket is there, its all-reduce begins, and
# the backward goes on. Here is a DDP of thirty lines that does so with the ring from above. A
# thread does the sending.

# %%
# %%writefile small_ddp.py
import json
import time
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread

import torch
import torch.distributed as dist
from all_reduces import on_ranks, ring
from slow_network import Card
from torch import nn


class SmallDDP:
    """Averages a module's gradients in buckets while its backward runs."""

    def __init__(self, module, bucket_bytes):
        self.card, self.queue, self.spans = Card(2e-3, 100e6), Queue(), []
        buckets = [[]]
        for parameter in reversed(list(module.parameters())):  # as the backward comes to them
            if sum(p.nbytes for p in buckets[-1]) >= bucket_bytes:
                buckets.append([])
            buckets[-1].append(parameter)
            parameter.register_post_accumulate_grad_hook(partial(self.note, buckets[-1]))
        self.missing = {id(bucket): len(bucket) for bucket in buckets}
        Thread(target=self.average, daemon=True).start()

    def note(self, bucket, _):
        """Counts a gradient that is there; the last one sends the bucket on its way."""
        self.missing[id(bucket)] -= 1
        if self.missing[id(bucket)] == 0:
            self.missing[id(bucket)] = len(bucket)
            self.queue.put(bucket)

    def average(self):
        """Averages one bucket after another, for ever."""
        while True:
            bucket = self.queue.get()
            begin = time.monotonic()
            flat = torch.cat([p.grad.flatten() for p in bucket])
            ring(flat, self.card)
            flat /= dist.get_world_size()
            means = flat.split([p.numel() for p in bucket])
            for parameter, mean in zip(bucket, means, strict=True):
                parameter.grad = mean.view_as(parameter)
            self.spans.append((begin, time.monotonic()))
            self.queue.task_done()

    def wait(self):
        """Waits for all averages of this step."""
        self.queue.join()


def train(bucket_bytes):
    """Takes some steps, and writes when the middle one did what."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())]
    module = nn.Sequential(*layers)
    ddp = SmallDDP(module, bucket_bytes)
    steps = []
    for _ in range(3):
        x = torch.randn(1024, 512) + dist.get_rank()
        module.zero_grad()
        ddp.spans.clear()
        dist.barrier()
        marks = [time.monotonic()]
        loss = module(x).square().mean()
        marks.append(time.monotonic())
        loss.backward()
        marks.append(time.monotonic())
        ddp.wait()
        marks.append(time.monotonic())
        steps.append((marks[-1] - marks[0], marks, list(ddp.spans)))
    mine = module[0].weight.grad.clone()
    dist.all_reduce(mine)
    assert torch.allclose(mine / 2, module[0].weight.grad, atol=1e-7)  # the ranks agree
    if dist.get_rank() == 0:
        with Path("steps.jsonl").open("a") as file:
            file.write(json.dumps(sorted(steps)[len(steps) // 2]) + "\n")


if __name__ == "__main__":
    Path("steps.jsonl").unlink(missing_ok=True)
    for mib in (1000, 2, 0):  # all in one, three buckets, each tensor alone
        on_ranks(2, train, mib * 2**20)

# %% language="bash"
# python small_ddp.py

# %%
names = ["one bucket of all", "buckets of 2 MiB", "a bucket for each tensor"]
lines = Path("steps.jsonl").read_text().splitlines()
steps = dict(zip(names, map(json.loads, lines), strict=True))

figure, axes = plt.subplots(figsize=(9, 3.4), layout="constrained")
for row, (name, (seconds, marks, spans)) in enumerate(steps.items()):
    places = [(1e3 * (a - marks[0]), 1e3 * (b - a)) for a, b in pairwise(marks[:3])]
    axes.broken_barh(places, (3 * row, 0.9), facecolors=["#56B4E9", "#0072B2"], edgecolor="white")
    sent = [(1e3 * (a - marks[0]), 1e3 * (b - a)) for a, b in spans]
    axes.broken_barh(sent, (3 * row + 1, 0.9), facecolors="#E69F00", edgecolor="white")
    exposed = 1e3 * (marks[3] - marks[2])
    print(f"{name:25} a step takes {1e3 * seconds:3.0f} ms, {exposed:3.0f} ms of them exposed")
axes.set_yticks([3 * row + 0.95 for row in range(3)], names)
axes.invert_yaxis()
axes.set_xlabel("ms   (light: forward, dark: backward, orange: on the link)")
axes.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# With one bucket the link is idle during the backward, and then the processor is idle. With
# several, most of the sending is *hidden* behind the backward. What remains *exposed* is the last
# bucket, and what the link cannot carry in time. With a bucket for each tensor each bias costs the
# latency of two messages, though it has few bytes. So buckets are a compromise: DDP's default is 25
# MB.
#
# `DDPStrategy(bucket_megabytes=...)` sets their size, and `DDPStrategy(overlap=False)` sends all
# gradients behind the backward, to measure what overlap brings. If the link is too slow for any
# bucket, send less: `compression="int8"`, or `sync_every=8`, under which replicas take eight steps
# of their own and then average their weights. [ddp](../docs/ddp.md) has them all.
#
# ## A larger batch, a larger learning rate?
#
# With $N$ replicas, a step has $N$ times as many samples, and an epoch has an $N$th of the steps.
# If the learning rate stays, the weights do not get as far. The usual advice is the *linear rule*:
# $N$ times the batch, $N$ times the rate. As long as weights hardly move within $N$ small steps,
# one large step along their mean gradient leads to about the same place. Others multiply by
# $\sqrt{N}$: the noise of a mean over $N$ times as many samples is that much smaller.
#
# Replicas learn what one device learns from the whole batch, as we saw. So one process can try
# this.


# %%
def loss_after(num_replicas: int, rate: float, epochs: int = 4) -> float:
    """Trains with batches of 16 samples for each replica; returns the loss of all samples."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    draws = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for picks in torch.randperm(len(images), generator=draws).split(16 * num_replicas):
            optimizer.zero_grad()
            F.cross_entropy(model(images[picks]), labels[picks]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(F.cross_entropy(model(images), labels))


replicas = [1, 2, 4, 8, 16, 32, 64]
rules = {
    "rate 0.1": lambda n: 0.1,
    "0.1 x the root of N": lambda n: 0.1 * n**0.5,
    "0.1 x N": lambda n: 0.1 * n,
}
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for (rule, rate), colour in zip(rules.items(), ("#000000", "#E69F00", "#0072B2"), strict=True):
    losses = [loss_after(n, rate(n)) for n in replicas]
    axes.plot(replicas, losses, "o-", color=colour, label=rule)
    found = "  ".join(f"{n}: {loss:.2f}" for n, loss in zip(replicas, losses, strict=True))
    print(f"{rule:20}", found)
axes.set_xscale("log", base=2)
axes.set_xticks(replicas, [str(n) for n in replicas])
axes.set_ylim(0, 2.5)
axes.set_xlabel("replicas, each with 16 samples per step")
axes.set_ylabel("cross-entropy after 4 epochs (nats)")
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# With the rate of one replica, each doubling costs: there are fewer steps, and they are no longer.
# The linear rule keeps what was learned, here up to 16 replicas, and then breaks at once: a step
# has become so long that it leaps over what it aims at. The root learns more slowly, and has not
# broken here. No rule says where the end is. Look for it with a few short runs, and begin a run
# with a *warm-up*, some hundred steps of a rate that rises, since a network with random weights
# bears the least.
#
# ## Without waiting: the parameter server
#
# An all-reduce makes all ranks wait for the slowest one. What if none waits? In *asynchronous SGD*
# a *parameter server* holds the weights. A *worker* takes them, computes a gradient and sends it.
# The server applies each gradient as it comes, and answers with the newest weights. In
# *synchronous* SGD it waits for a gradient of each worker and applies their sum, which is what an
# all-reduce computes. (The sum is four times the mean, so by the linear rule both have the same
# rate.)
#
# Here are both, for one server and four workers. A gradient takes 20 ms, and 80 ms on the last
# worker, a *straggler*. (They sleep, as two cores cannot show five ranks that compute.)

# %%
# %%writefile parameter_server.py
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from all_reduces import on_ranks
from digits import build, load_samples
from torch.nn.utils import parameters_to_vector, vector_to_parameters

WORKERS, SECONDS, RATE = (1, 2, 3, 4), 2.0, 0.05


class Gradients:
    """Computes gradients of a worker's own batches, one after another."""

    def __init__(self, worker):
        self.model, (self.images, self.labels) = build(), load_samples()
        self.draws = torch.Generator().manual_seed(worker)

    def next(self, weights):
        """Computes the gradient of the next batch."""
        vector_to_parameters(weights, self.model.parameters())
        picks = torch.randint(len(self.images), (16,), generator=self.draws)
        loss = F.cross_entropy(self.model(self.images[picks]), self.labels[picks])
        gradients = torch.autograd.grad(loss, list(self.model.parameters()))
        return torch.cat([gradient.flatten() for gradient in gradients])


def work(weights):
    """Answers weights with a gradient, until told to end."""
    rank = dist.get_rank()
    gradients, goes_on = Gradients(rank), torch.ones(1)
    dist.barrier()
    while True:
        dist.recv(goes_on, 0)
        if not goes_on:
            return
        dist.recv(weights, 0)
        gradient = gradients.next(weights)
        time.sleep(0.080 if rank == WORKERS[-1] else 0.020)
        dist.send(gradient, 0)


def send(weights, worker):
    """Sends weights to a worker."""
    dist.send(torch.ones(1), worker)
    dist.send(weights, worker)


def serve_together(weights, until):
    """Waits for all workers, and applies their gradients as one."""
    gradient, came = torch.empty_like(weights), []
    while time.monotonic() < until:
        for worker in WORKERS:
            send(weights, worker)
        total = torch.zeros_like(weights)
        for worker in WORKERS:
            dist.recv(gradient, worker)
            total += gradient
        weights -= RATE * total
        came.append((list(WORKERS), time.monotonic()))
    return came


def serve_each(weights, until):
    """Applies each gradient as it comes, from whichever worker."""
    gradient, came = torch.empty_like(weights), []
    for worker in WORKERS:
        send(weights, worker)
    busy = set(WORKERS)
    while busy:
        worker = dist.recv(gradient)
        weights -= RATE * gradient
        came.append(([worker], time.monotonic()))
        if time.monotonic() < until:
            send(weights, worker)
        else:
            busy.remove(worker)
    return came


def run(serve):
    """Runs the server on rank 0 and a worker on each other rank."""
    weights = parameters_to_vector(build().parameters()).detach()
    if dist.get_rank() > 0:
        work(weights)
        return
    dist.barrier()  # workers are there
    begin = time.monotonic()
    came = serve(weights, begin + SECONDS)
    for worker in WORKERS:
        dist.send(torch.zeros(1), worker)
    arrivals = [(workers, at - begin) for workers, at in came]
    found = {"arrivals": arrivals, "weights": weights.tolist()}
    Path(f"{serve.__name__}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for serve in (serve_together, serve_each):
        on_ranks(1 + len(WORKERS), run, serve)

# %% language="bash"
# python parameter_server.py

# %% [markdown]
# The server has noted in which order gradients came. With that order a plain loop can repeat the
# run, with no server at all. Each gradient is computed with the weights that its worker had last
# received.

# %%
from parameter_server import RATE, WORKERS, Gradients
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def repeat(
    arrivals: list, rate: float = RATE, momentum: float = 0.0
) -> tuple[Tensor, list[float], list[list[int]]]:
    """Repeats a run; returns the weights, the losses, and the ages of gradients by worker."""
    model = build()
    newest = parameters_to_vector(model.parameters()).detach()
    step = torch.zeros_like(newest)
    gradients = {worker: Gradients(worker) for worker in WORKERS}
    received = dict.fromkeys(WORKERS, newest)
    versions, losses, ages = dict.fromkeys(WORKERS, 0), [], [[] for _ in WORKERS]
    for update, (workers, _) in enumerate(arrivals):
        step = momentum * step + sum(gradients[w].next(received[w].clone()) for w in workers)
        newest = newest - rate * step
        for w in workers:
            ages[w - 1].append(update - versions[w])
            received[w], versions[w] = newest, update + 1
        vector_to_parameters(newest, model.parameters())
        with torch.no_grad():
            losses.append(float(F.cross_entropy(model(images), labels)))
    return newest, losses, ages


runs = {
    name: json.loads(Path(f"{file}.json").read_text())
    for name, file in (("synchronous", "serve_together"), ("asynchronous", "serve_each"))
}
figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for (name, run), colour in zip(runs.items(), ("#000000", "#0072B2"), strict=True):
    weights, losses, ages = repeat(run["arrivals"])
    apart = float((weights - torch.tensor(run["weights"], dtype=torch.float64)).abs().max())
    assert apart < 1e-12
    count = sum(len(workers) for workers, _ in run["arrivals"])
    print(f"{name}: {count} gradients, {len(losses)} updates; the loop differs by {apart:.0e}")
    means = [sum(of_worker) / len(of_worker) for of_worker in ages]
    print(f"  mean staleness of each worker's gradients: {', '.join(f'{m:.1f}' for m in means)}")
    axes.plot([at for _, at in run["arrivals"]], losses, color=colour, label=name)
axes.set_xlabel("seconds")
axes.set_ylabel("cross-entropy (nats)")
axes.set_ylim(0, None)
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# Without waiting, the three fast workers go at their own speed, and the loss falls sooner. The
# price is in the last lines: *staleness*, the number of updates that came between a gradient's
# weights and its own update. With four equal workers it would be three. The straggler's gradients
# are the oldest.
#
# How much does staleness matter? We repeat both orders with other rates, with momentum and without,
# up to the same number of gradients.

# %%
gradients = sum(len(workers) for workers, _ in runs["synchronous"]["arrivals"])
print(f"cross-entropy after {gradients} gradients")
for momentum, rates in ((0.0, (0.05, 0.1, 0.2, 0.4)), (0.9, (0.02, 0.04, 0.08, 0.16))):
    print(f"momentum {momentum}, rate{'':10}", "".join(f"{rate:8}" for rate in rates))
    for name, run in runs.items():
        first = run["arrivals"][: gradients // len(run["arrivals"][0][0])]
        found = [repeat(first, rate, momentum)[1][-1] for rate in rates]
        print(f"  {name:28}", "".join(f"{loss:8.2f}" for loss in found))

# %% [markdown]
# Plain SGD with a small rate hardly notices: weights move little while a gradient is computed. With
# momentum, which most trainings use, it matters: a rate that the synchronous way bears well breaks
# the asynchronous one, which goes on in a direction for many steps before a gradient tells it to
# turn. So asynchrony pays where workers are uneven or links slow, and steps small. With equal
# workers an all-reduce wins: no gradient is stale, and no single card carries everything, as the
# server's does. Real systems therefore cut the weights into parts with a server each, and bound the
# staleness: a worker that is too far ahead waits.
#
# So does this package, for any LightningModule: `ParameterServerStrategy(mode="bounded",
# max_staleness=8, num_servers=2)`, or `mode="async"` and `mode="sync"`. Replace `DDPStrategy()` by
# it in `train_digits.py`. Its servers are threads on the first ranks, so all ranks are workers.
# There each worker has equally many batches, unlike in the script above, and an epoch ends with the
# slowest one. So it pays where slowness moves from worker to worker, and little where always the
# same one is a straggler: [parameter_server](../docs/parameter_server.md#slow-workers) has both
# measured.
#
# There is asynchrony in pipelines too, without a server: see the lesson on [weight
# stashing](02_weight_stashing_and_staleness.ipynb).
#
# ## Try it
#
# - In `slow_network.py`, set the latency to 0.1 ms. Which algorithm wins at 64 KiB now?
# - Run `ring` on 6 ranks with 2 MiB. Why does `chunk` spoil it, and what would help?
# - Give `DDPStrategy` `sync_every=8` in `train_digits.py`. What do the weights differ by then?
# - In `parameter_server.py`, let no worker be a straggler. Which way learns more in two seconds?
