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
# # Weight stashing and staleness
#
# Here is your LightningModule. To train it in a pipeline that never waits, add this to its Trainer:
#
# ```python
# strategy=PipelineStrategy(schedule="pipedream")
# ```
#
# The lesson before this one showed that such a pipeline has no bubble. This one shows what that
# costs, and how to pay no more than needed. These words are all that the first run needs:
#
# - A *rank* is a process. Each rank has a *stage*, a part of the layers, and updates its weights by
#   itself. A *version* is the weights after some number of updates.
# - *Staleness* is the number of updates that come between a version's use and the update that
#   results from it.
# - The *stash* is the older versions that a rank keeps.
#
# You will then get a wrong gradient from PyTorch without any error, mend it, write down in twenty
# lines what such a pipeline must compute, and see what stale weights do to learning. Two CPU cores
# are enough, and nothing needs the network. All numbers below are printed by code.

# %%
# %%writefile train_digits.py
import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy


def build(num_layers, seed=0):
    """Builds a network of some layers."""
    torch.manual_seed(seed)
    sizes = [64, *[32] * (num_layers - 1)]
    hidden = [
        nn.Sequential(nn.Linear(size, 32), nn.LayerNorm(32), nn.Tanh()) for size in sizes[:-1]
    ]
    return nn.Sequential(*hidden, nn.Linear(32, 10))


class Digits(L.LightningModule):
    """Reads scanned digits."""

    def __init__(self):
        super().__init__()
        self.model = build(num_layers=2)

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader():
    """Returns the same batches each time."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0 - 0.3)
    return DataLoader(TensorDataset(images, torch.tensor(digits.target)), 32)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for weight_versions in ("stash", "none"):  # "stash" is the default
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=PipelineStrategy(
                schedule="pipedream", weight_versions=weight_versions, log_staleness=True
            ),
            precision="64-true",  # to compare to the last digits
            max_epochs=1,
            logger=CSVLogger(".", name="logs", version=weight_versions),
            log_every_n_steps=1,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(), loader())
        trainer.save_checkpoint(f"{weight_versions}.ckpt")

# %% [markdown]
# A notebook is one process, and a pipeline takes several. So the script runs outside, as in a
# terminal. It starts its second process by itself.

# %% language="bash"
# python train_digits.py 2> messages.txt

# %%
import copy
import csv
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from train_digits import build, loader

from lightning_dist.checkpoint import load_full
from lightning_dist.engine.schedules import build_schedule

# %matplotlib inline
torch.set_num_threads(1)

with Path("logs/stash/metrics.csv").open() as table:
    rows = [row for row in csv.DictReader(table) if row["staleness/stage_0"]]
print("step  staleness of both stages  bytes of their stash")
for row in [*rows[:3], rows[-1]]:
    ages = [row[f"staleness/stage_{stage}"] for stage in range(2)]
    sizes = [row[f"stash_bytes/stage_{stage}"] for stage in range(2)]
    print(f"{row['step']:>4}  {', '.join(ages):24}  {', '.join(sizes)}")

# %% [markdown]
# From its second update on, the first stage's weights are stale by one update, and it keeps one
# older version of them. The last stage's are not stale, and it keeps none. (The first update is the
# row of step 3, and the last three of the run are missing: ranks exchange these numbers without
# waiting, so they are logged three steps later than they were measured, with two stages.) Why is
# that so?
#
# ## Which weights does a batch meet?
#
# Here is `pipedream` with four stages. A row is a rank, a column is a slot of time, `F0` is the
# forward of batch 0 and `B0` its backward. After each backward the rank updates its own weights.

# %%
NUM_STAGES = 4
schedule = build_schedule("pipedream", num_stages=NUM_STAGES, num_microbatches=8)
print(schedule.format_grid())
print("batches on their way, by rank:", [schedule.in_flight(rank) for rank in range(NUM_STAGES)])

# %% [markdown]
# Look at rank 0. It runs `F1`, `F2` and `F3` before its first backward, so all of these use the
# first weights. Then `B0` comes, and an update. When `B1` comes, the weights are no longer those
# that `F1` has used. By the time of `B3` there have been three updates.
#
# Of the batches that are on their way, one is the batch itself. So with $n$ stages, stage $s$ makes
# $n - 1 - s$ updates between a forward and its backward: three, two, one and none.
#
# That is two problems in one:
#
# - **Forward and backward disagree.** A backward must use the weights of its forward. Otherwise
#   what it computes is the gradient of nothing.
# - **The gradient is late.** It says how to change weights that no longer exist. This is staleness.
#
# The first can be cured, and the second cannot, as long as no rank waits.
#
# ## A wrong gradient without an error
#
# PyTorch guards against the first problem. If you change weights that a backward still needs, it
# refuses.

# %%
torch.manual_seed(0)
layers = nn.Sequential(
    nn.Conv1d(4, 8, 3), nn.Tanh(), nn.Flatten(), nn.LayerNorm(48), nn.Linear(48, 3)
).double()
samples = torch.randn(16, 4, 8, dtype=torch.float64)


def change_weights(size: float) -> None:
    """Changes the weights as an optimizer does."""
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.add_(size * torch.randn_like(parameter))


loss = layers(samples).square().mean()
change_weights(0.1)
try:
    loss.backward()
except RuntimeError as error:
    print(str(error).partition(";")[0])

# %% [markdown]
# But the guard looks at tensors that PyTorch knows to be changed. Code that writes through `.data`
# escapes it, and so does code that computes the forward again in the backward to save memory. Then
# no error comes, and the gradient is wrong. How wrong depends on how far the weights have moved.


# %%
def gradient_error(size: float) -> float:
    """Compares the gradient after the weights have moved with the true one."""
    net = copy.deepcopy(layers)
    true = torch.autograd.grad(net(samples).square().mean(), list(net.parameters()))
    loss = net(samples).square().mean()
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.add_(size * noise)  # PyTorch does not see this
    wrong = torch.autograd.grad(loss, list(net.parameters()))
    apart = sum(float((a - b).square().sum()) for a, b in zip(wrong, true, strict=True))
    return (apart / sum(float(a.square().sum()) for a in true)) ** 0.5


for size in (0.0, 0.001, 0.01, 0.1):
    print(f"weights moved by about {size:5.3f}: the gradient is off by {gradient_error(size):6.1%}")

# %% [markdown]
# ## The cure: keep the old weights
#
# PipeDream's answer is the *stash*. A forward notes which version it uses, and that version is kept
# until the backward is done. It takes little code: run the layers on tensors that are not the
# parameters themselves, so that an update of the parameters does not touch them.

# %%
net = copy.deepcopy(layers)
true = torch.autograd.grad(net(samples).square().mean(), list(net.parameters()))

version = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
loss = functional_call(net, version, samples).square().mean()
for parameter in net.parameters():
    parameter.data.add_(0.1)  # an update, while the batch is on its way
kept = torch.autograd.grad(loss, list(version.values()))
print("same gradient as without the update:", all(map(torch.equal, kept, true)))

# %% [markdown]
# The package copies weights only when they are about to be overwritten while a batch still needs
# them. The last stage never copies.
#
# ## What must come out
#
# Does the result depend on how fast the ranks are? No. The schedule fixes the version that each
# batch meets, so we can write down what must come out as a plain loop, with no pipeline at all.
# Batch $b$ meets version $b - (n - 1 - s)$ of stage $s$ (or version 0, if that is negative). Its
# gradient is applied to the newest version. Without the stash, the backward meets version $b$.


# %%
Batch = tuple[Tensor, Tensor]


def train_in_a_loop(
    stages: Sequence[nn.Module], batches: Sequence[Batch], rate: float, how: str
) -> list[float]:
    """Trains the stages in place; `how` is "no pipeline", "stash" or "no stash"."""

    def newest(stage: nn.Module) -> dict[str, Tensor]:
        return {n: p.detach().clone().requires_grad_() for n, p in stage.named_parameters()}

    optimizers = [torch.optim.SGD(stage.parameters(), lr=rate) for stage in stages]
    versions = [[newest(stage)] for stage in stages]
    last, losses = len(stages) - 1, []
    for b, (inputs, targets) in enumerate(batches):
        age = [0 if how == "no pipeline" else last - s for s in range(last + 1)]
        used = [versions[s][max(0, b - age[s])] for s in range(last + 1)]
        received = [inputs]  # what each stage receives
        for stage, weights in zip(stages, used, strict=True):
            received.append(functional_call(stage, weights, received[-1]).detach())
        losses.append(float(F.cross_entropy(received.pop(), targets)))
        gradient = None
        for s in reversed(range(last + 1)):
            weights = versions[s][b] if how == "no stash" else used[s]
            given = received[s].requires_grad_()
            out = functional_call(stages[s], weights, given)
            root = F.cross_entropy(out, targets) if s == last else out
            gradient, *own = torch.autograd.grad(root, [given, *weights.values()], gradient)
            for parameter, part in zip(stages[s].parameters(), own, strict=True):
                parameter.grad = part
            optimizers[s].step()
            versions[s].append(newest(stages[s]))
    return losses


# %% [markdown]
# The Trainer has trained with the stash and without, on two processes, in `float64`. We compare the
# weights that it saved with those of the loop.

# %%
batches = list(loader())
for weight_versions, how in (("stash", "stash"), ("none", "no stash"), ("stash", "no pipeline")):
    expected = build(num_layers=2).double()
    train_in_a_loop(list(expected), batches, 0.1, how)
    trained = load_full(f"{weight_versions}.ckpt")["state_dict"]
    pairs = [(trained[f"model.{name}"], p) for name, p in expected.state_dict().items()]
    apart = max(float((a - b).abs().max()) for a, b in pairs)
    print(f"Trainer, {weight_versions:6} loop, {how:12} largest difference {apart:.0e}")

# %% [markdown]
# The Trainer computes what the loop says, to the last digits of `float64`. That is not what one
# device computes, as the last line says. The tests of the package compare all its schedules so.
#
# ## What goes wrong without
#
# How much does it matter? We train the digits in three ways, over a range of learning rates:
# without a pipeline, with the stash, and without. Eight stages make the effect plain.

# %%
rates = [0.01, 0.03, 0.1, 0.3]
hows = {"no pipeline": "#000000", "stash": "#0072B2", "no stash": "#D55E00"}
SEEDS = (0, 1)


digits = load_digits()
images = torch.tensor(digits.data / 16.0 - 0.3, dtype=torch.float32)
labels = torch.tensor(digits.target)
draws = torch.Generator().manual_seed(0)
picks = [torch.randint(len(images), (32,), generator=draws) for _ in range(200)]
small = [(images[pick], labels[pick]) for pick in picks]


def final_loss(how: str, rate: float, seed: int) -> float:
    """Trains, and averages the loss of the last 20 batches."""
    losses = train_in_a_loop(list(build(8, seed)), small, rate, how)
    return sum(losses[-20:]) / 20


found = {how: [[final_loss(how, rate, seed) for seed in SEEDS] for rate in rates] for how in hows}

figure, axes = plt.subplots(figsize=(8, 4))
for (how, colour), marker in zip(hows.items(), "os^", strict=True):
    means = [sum(of_rate) / len(of_rate) for of_rate in found[how]]
    axes.plot(rates, means, marker=marker, color=colour, label=how)
    for rate, of_rate in zip(rates, found[how], strict=True):
        axes.plot([rate] * len(of_rate), of_rate, marker, color=colour, alpha=0.35)
    print(
        f"{how:12}", "  ".join(f"{rate:g}: {m:.2f}" for rate, m in zip(rates, means, strict=True))
    )
axes.axhline(torch.tensor(10.0).log(), color="grey", linewidth=0.8)
axes.text(rates[0], 2.33, "guessing", color="grey")
axes.set_ylim(0, 2.6)
axes.set_xscale("log")
axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
axes.minorticks_off()
axes.set_xlabel("learning rate")
axes.set_ylabel("cross-entropy after 200 batches (nats)")
axes.set_title("Eight stages; faint marks are single seeds", loc="left", fontsize=11)
axes.grid(alpha=0.3)
axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0, 0.68))
plt.show()

# %% [markdown]
# At the smallest rate the stash makes no difference: the weights hardly move while a batch is on
# its way. The larger the rate, the further they move. Then training with the stash beats training
# without it, because its gradients are at least gradients of some network. Training without a
# pipeline beats both at any rate: the stash does not cure staleness. (Two seeds are few. Look at
# how far apart the faint marks are.)
#
# What helps against staleness? Fewer stages, since each adds an update of delay. A smaller learning
# rate, or a warm-up. `schedule="pipedream_2bw"`, which is one update late whatever the number of
# stages, and with it `staleness_correction="predict"`, which estimates that update from the
# optimizer's momentum. Or a schedule that waits: `1f1b` and the zero-bubble schedules have no
# staleness at all.
#
# ## What does the stash cost?
#
# Memory. Stage $s$ keeps one version for each batch on its way, $n - s$ with the newest. We count
# them in the schedule. (`pipedream_2bw` needs at most two on any stage, however many there are.)

# %%
print("weight versions kept, by stage")
for num_stages in (2, 4, 8):
    plan = build_schedule("pipedream", num_stages=num_stages, num_microbatches=4 * num_stages)
    print(
        f"  pipedream, {num_stages} stages: {[plan.in_flight(rank) for rank in range(num_stages)]}"
    )

# %% [markdown]
# Weights are often the smaller part: a stage's activations and the optimizer's state take more.
#
# ## Try it
#
# - Give `train_in_a_loop` a `momentum` of 0.9. Which learning rates still work with eight stages?
# - Replace `nn.LayerNorm` in `build` by nothing. Is training without the stash still worse than
#   with it?
# - In `train_in_a_loop`, set every `age` to 1, on all stages. That is `pipedream_2bw`. Where does
#   its curve lie?
