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
# # Mixed precision
#
# Here is your LightningModule. To compute in 16 bits and lose nothing by it, add this to its
# Trainer:
#
# ```python
# callbacks=[MixedPrecision("bf16")]
# ```
#
# Numbers in 16 bits take half the memory of those in 32, travel twice as fast, and modern devices
# compute with them several times as fast. But they are coarse. This lesson shows what goes wrong
# and the three remedies that together are called *mixed precision*. You will
#
# 1. train with the callback and without;
# 2. see what 16 bits can hold, and what they lose;
# 3. lose small updates, and save them with *master weights*;
# 4. lose small gradients, and save them with *loss scaling*;
# 5. write the whole scheme as a loop, and get the same weights from the callback;
# 6. see that what a pipeline keeps of old weights becomes half as large.
#
# Two CPU cores are enough, and nothing needs the network. All numbers below are printed by code. (A
# CPU is no faster with 16 bits. But it learns the same as a GPU does, and that is our topic.)

# %%
# %%writefile train_in_16_bits.py
import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import PipelineStrategy
from lightning_dist.callbacks import MixedPrecision


class Digits(L.LightningModule):
    """Reads scanned digits; the loss is multiplied by a share, the learning rate divided by it."""

    def __init__(self, rate=0.05, share=1.0):
        super().__init__()
        torch.manual_seed(0)
        hidden = [nn.Linear(64, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        self.network = nn.Sequential(*hidden, nn.Linear(64, 10))
        self.rate, self.share = rate, share

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        images, labels = batch
        return self.share * F.cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.rate / self.share)


def loader():
    """Returns the same batches each time."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0 - 0.3, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    draws = torch.Generator().manual_seed(0)
    picks = torch.cat([torch.randperm(len(images), generator=draws) for _ in range(4)])
    return DataLoader(TensorDataset(images[picks], labels[picks]), 32)


if __name__ == "__main__":  # the last part of the lesson
    torch.set_num_threads(1)
    for name, callbacks in {"fp32": [], "bf16": [MixedPrecision("bf16")]}.items():
        trainer = L.Trainer(
            accelerator="cpu",
            devices=2,
            strategy=PipelineStrategy(schedule="pipedream", log_staleness=True),
            callbacks=callbacks,
            max_steps=20,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(), loader())
        if trainer.is_global_zero:
            stash = trainer.callback_metrics["stash_bytes/stage_0"]
            print(f"{name}: {stash / 2**10:.1f} KiB")

# %%
import copy
import logging
import warnings

import lightning as L
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_in_16_bits import Digits, loader

from lightning_dist.callbacks import MixedPrecision

# %matplotlib inline
torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
for message in (".*does not have many workers", ".*LeafSpec"):  # Lightning's, of no matter here
    warnings.filterwarnings("ignore", message=message)


class Notes(L.Callback):
    """Notes the loss of each batch, and the number by which it was multiplied."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.scales: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: Digits, outputs: dict[str, Tensor], *_: object
    ) -> None:
        """Notes what is known after the batch."""
        self.losses.append(float(outputs["loss"]) / pl_module.share)
        scale = trainer.callback_metrics.get("mixed_precision/loss_scale", torch.tensor(1.0))
        self.scales.append(float(scale))


def train(module: Digits, *callbacks: L.Callback, epochs: int = 1) -> Notes:
    """Trains on one device."""
    notes = Notes()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[*callbacks, notes],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader())
    return notes


for name, callbacks in {"fp32": [], "bf16": [MixedPrecision("bf16")]}.items():
    print(f"{name}: loss of the last batch {train(Digits(), *callbacks).losses[-1]:.4f}")

# %% [markdown]
# Nearly the same loss, with half of the bits. That is not a matter of course.
#
# ## What do 16 bits hold?
#
# A floating-point number has an exponent, which sets the range, and a fraction, which sets how fine
# it is. There are two ways to share 16 bits out. `fp16` has more fraction, `bf16` has the exponent
# of `fp32`.

# %%
print(f"{'':9}{'largest':>9}{'smallest':>10}{'gap after 1':>14}")
for name, dtype in {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}.items():
    info = torch.finfo(dtype)
    print(f"{name:9}{info.max:9.1e}{info.smallest_normal * info.eps:10.1e}{info.eps:14.4%}")

print()
print("300 x 300 in fp16:  ", float(torch.tensor(300.0).half() * 300))
print("1e-8 in fp16:       ", float(torch.tensor(1e-8).half()))
print("1 + 0.001 in bf16:  ", float(torch.tensor(1.0).bfloat16() + 0.001))

# %% [markdown]
# So `fp16` overflows, and small numbers become zero: they *underflow*. `bf16` does neither, but a
# small number that is added to a large one is lost.
#
# ## Small updates
#
# That last line is the story of every weight late in training: an update is often a thousandth of
# the weight, or less. Here is a weight of 1 that is made smaller by 0.0001 a thousand times.

# %%
half, single, master = torch.tensor(1.0).bfloat16(), torch.tensor(1.0), torch.tensor(1.0)
for _ in range(1000):
    half -= 0.0001
    single -= 0.0001
    master -= 0.0001
    half_copy = master.bfloat16()
print(f"in fp32:                     {float(single):.4f}")
print(f"in bf16:                     {float(half):.4f}")
print(f"in bf16, with a master copy: {float(half_copy):.4f}")

# %% [markdown]
# The weight in `bf16` has not moved at all: each single update was rounded away. The remedy is the
# **master weight**. The optimizer adds its updates to a copy in `fp32`, and forward and backward
# use that copy rounded to 16 bits.
#
# ## Small gradients
#
# How small are gradients? We train for a while in `fp32` and look. To make it hard, the loss is
# divided by 262,144 and the learning rate multiplied by it. That is what happens if a loss is a
# mean over the pixels of an image of 512 x 512. In `fp32` it changes nothing.

# %%
SHARE = 2.0**-18
module = Digits(share=SHARE)
train(module)
gradient = torch.cat([p.grad.flatten() for p in module.parameters()]).abs()
gradient = gradient[gradient > 0]
scale = 2.0**18

figure, axes = plt.subplots(figsize=(8, 4))
edges = torch.arange(-40, 17).tolist()
for values, colour, label in (
    (gradient, "#0072B2", "gradient"),
    (gradient * scale, "#E69F00", "gradient of the loss x 262,144"),
):
    axes.hist(values.log2().tolist(), bins=edges, color=colour, alpha=0.75, label=label)
axes.axvspan(-40, -25, color="#E8E8E8", zorder=0)
axes.text(-39.5, axes.get_ylim()[1] * 0.92, "zero in fp16", color="#555555")
axes.axvspan(16, 17, color="#E8E8E8", zorder=0)
axes.set_xlim(-40, 17)
axes.set_xticks(range(-40, 17, 8), [f"$2^{{{x}}}$" for x in range(-40, 17, 8)])
axes.set_xlabel("size of a gradient's element")
axes.set_ylabel("elements")
axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
plt.show()

lost = float((gradient.half() == 0).float().mean())
still_lost = float(((gradient * scale).half() == 0).float().mean())
print(f"become zero in fp16: {lost:.2%}; with the loss scaled: {still_lost:.2%}")

# %% [markdown]
# Much of the blue heap is zero in `fp16`. The remedy costs almost nothing. A gradient is linear in
# the loss, so if the loss is multiplied by a number, all gradients are. **Loss scaling** moves the
# heap to the right before the backward, and the `fp32` gradients are divided by the same number
# afterwards.
#
# How large may the scale be? If the heap touches the right end, numbers become infinite. So a
# *dynamic* scale begins large. Whenever a gradient is not finite, the step is left out and the
# scale halves. After many good steps it doubles. `bf16` has the range of `fp32` and needs no scale.
#
# ## The whole scheme
#
# The third remedy is to leave some things in `fp32`: norms, whose sums need it, and the loss. Now
# we can write it down. Compare it with a loop of your own: what is new are the copies, and the way
# of the gradients back to the masters.


# %%
def train_in_a_loop(module: Digits, dtype: torch.dtype) -> None:
    """Trains with half-precision copies of fp32 masters; without a loss scale."""
    masters = module.network
    optimizer = module.configure_optimizers()
    for inputs, targets in loader():
        half = copy.deepcopy(masters).to(dtype)
        half[1] = copy.deepcopy(masters[1])  # the norm
        h = inputs.to(dtype)
        for layer in half:
            h = layer(h.float()).to(dtype) if isinstance(layer, nn.LayerNorm) else layer(h)
        (module.share * F.cross_entropy(h.float(), targets)).backward()
        for master, copied in zip(masters.parameters(), half.parameters(), strict=True):
            master.grad = copied.grad.float()
        optimizer.step()


by_hand, by_callback = Digits(), Digits()
train_in_a_loop(by_hand, torch.bfloat16)
train(by_callback, MixedPrecision("bf16"))
pairs = zip(by_hand.parameters(), by_callback.parameters(), strict=True)
print("the same weights, bit for bit:", all(torch.equal(a, b) for a, b in pairs))
print("the module's parameters are the masters:", next(by_callback.parameters()).dtype)

# %% [markdown]
# The callback does the same under any strategy, to a module that knows nothing of it.
#
# ## What do the remedies buy?
#
# We train five times: in `fp32`; in `bf16` with and without masters; in `fp16` with a dynamic scale
# that begins far too large, and with none. The learning rate is small, so that updates are small
# beside the weights.

# %%
SMALL_RATE, EPOCHS = 0.01, 2
remedies = {
    "fp32": [],
    "bf16, masters": [MixedPrecision("bf16")],
    "bf16, no masters": [MixedPrecision("bf16", master_weights=False)],
    "fp16, masters, dynamic scale": [
        MixedPrecision("fp16", initial_scale=2.0**40, growth_interval=100)
    ],
    "fp16, masters, no scale": [MixedPrecision("fp16", loss_scale=None)],
}
runs = {
    name: train(Digits(SMALL_RATE, SHARE), *callbacks, epochs=EPOCHS)
    for name, callbacks in remedies.items()
}
looks = {
    "fp32": ("#000000", "-"),
    "bf16, masters": ("#0072B2", "--"),
    "bf16, no masters": ("#D55E00", "-"),
    "fp16, masters, dynamic scale": ("#009E73", ":"),
    "fp16, masters, no scale": ("#CC79A7", "-."),
}


def smooth(values: list[float], width: int = 20) -> Tensor:
    """Computes running means."""
    return torch.tensor(values).unfold(0, width, 1).mean(1)


figure, (upper, lower) = plt.subplots(
    2, 1, figsize=(8, 5.5), sharex=True, height_ratios=[3, 1.4], layout="constrained"
)
for name, run in runs.items():
    colour, line = looks[name]
    upper.plot(smooth(run.losses), color=colour, linestyle=line, label=name)
    print(f"{name:30} loss of the last 20 batches: {float(smooth(run.losses)[-1]):.4f}")
upper.set_ylim(bottom=0)
upper.set_ylabel("cross-entropy (nats)")
upper.legend(frameon=False)
scales = runs["fp16, masters, dynamic scale"].scales
lower.step(range(len(scales)), torch.tensor(scales).log2(), where="post", color="#009E73")
lower.set_ylabel("loss scale ($\\log_2$)")
lower.set_xlabel("batch")
for panel in (upper, lower):
    panel.grid(alpha=0.3)
plt.show()

# %% [markdown]
# With masters the curves of `bf16` and of `fp16` with a scale lie on that of `fp32`. Without
# masters `bf16` falls behind, because its small updates are rounded away. So does `fp16` without a
# scale, because its small gradients are zero. The lower picture is the dynamic scale. It begins
# with $2^{40}$ and halves at once for some batches, whose steps are left out. Now and then it tries
# a larger one.
#
# Does your own network need a scale? `MixedPrecision("fp16", log_layers_every_n_steps=100)` logs
# for each layer which share of its gradient has underflowed.
#
# ## What it saves in a pipeline
#
# A *pipeline* has a part of the layers on each process, a *stage*. Under `schedule="pipedream"` a
# stage keeps older versions of its weights, the *stash*; see the lesson on that. With
# `MixedPrecision` these versions *are* the half-precision copies, and no master is ever copied. The
# script from the beginning trains on two processes, with the callback and without, and prints what
# the stash takes on the first stage.

# %% language="bash"
# python train_in_16_bits.py 2> messages.txt

# %% [markdown]
# About half of it: a norm stays in `fp32`. With more stages there are more versions: stage 0 of
# eight keeps seven old ones, at two bytes per parameter instead of four.
#
# ## Try it
#
# - Set `keep_fp32=["loss"]` in `MixedPrecision`. Does the norm need `fp32` here?
# - Set `SMALL_RATE` to 0.1. Do the masters still matter?
# - Set `SHARE` to 1. Does `fp16` still need a scale here?
