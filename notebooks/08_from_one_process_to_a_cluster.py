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
# # From one process to a cluster
#
# Here is your LightningModule, and a strategy is in its Trainer. On one machine it trains. On many,
# for days, processes are killed, disks fill up, and the queue wants its machines back. To survive
# all that, add this to the Trainer:
#
# ```python
# callbacks=[
#     Elastic(replicas=2),
#     ModelCheckpoint("checkpoints", every_n_train_steps=8, save_last=True, save_on_exception=True),
# ]
# ```
#
# and this to the call of `fit`:
#
# ```python
# trainer.fit(module, loader, ckpt_path="last")
# ```
#
# These words are all that the first run needs:
#
# - A *rank* is a process, and has a device. A *launcher* is the program that starts the ranks.
# - A *checkpoint* is all that a run needs in order to go on: weights, optimizer state, and its
#   place in the data.
# - To *resume* is to go on from a checkpoint. To be *preempted* is to be told to end, since the
#   machine is wanted.
#
# You will train once without trouble. Then you will kill a process of the same training, resume it
# on another number of processes, preempt it, resume it under another launcher, and end up with the
# same weights. Two CPU cores are enough, and nothing needs the network. All numbers below are
# printed by code.

# %%
# %%writefile train.py
import json
import os
import signal
import sys
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import DDPStrategy
from lightning_dist.callbacks import Elastic


class Digits(L.LightningModule):
    """Reads scanned digits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(64, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 10)]
        self.model = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        """Computes the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        """Creates the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Trouble(L.Callback):
    """Notes losses, and sends a signal to the last rank at some step."""

    def __init__(self, file, what, step):
        self.file, self.what, self.step = Path(file), what, step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        """Looks which step it is."""
        if trainer.is_global_zero:
            with self.file.open("a") as file:
                # Lightning has divided the loss by the number of batches per update.
                loss = float(outputs["loss"]) * trainer.accumulate_grad_batches
                file.write(json.dumps([trainer.global_step, loss]) + "\n")
        is_last = trainer.global_rank == trainer.world_size - 1
        if is_last and self.what and trainer.global_step == self.step:
            self.step = None  # once
            os.kill(os.getpid(), self.what)


if __name__ == "__main__":
    name, devices, what, step = sys.argv[1:]
    torch.set_num_threads(1)
    L.seed_everything(0)
    samples = TensorDataset(*torch.load("digits.pt"))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(devices),
        strategy=DDPStrategy(),
        callbacks=[
            Elastic(replicas=2),
            ModelCheckpoint(name, every_n_train_steps=8, save_last=True, save_on_exception=True),
            Trouble(f"{name}-{devices}-{what}.jsonl", getattr(signal, what, None), int(step)),
        ],
        precision="64-true",  # to compare to the last digits
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(samples, batch_size=32, shuffle=True), ckpt_path="last")
    trainer.save_checkpoint(f"{name}.ckpt")

# %%
import torch
from sklearn.datasets import load_digits

digits = load_digits()
torch.save((torch.tensor(digits.data / 16.0 - 0.3), torch.tensor(digits.target)), "digits.pt")

# %% [markdown]
# A notebook is one process, so the script runs outside, as in a terminal. First without trouble, on
# two processes. We do not wait for its end: its weights are needed last.

# %% language="bash"
# python train.py smooth 2 none 0 &> smooth.txt &

# %% [markdown]
# ## Who starts the ranks?
#
# Each rank must know how many there are, which one it is, and where rank 0 waits for the others.
# These are a few environment variables, and a launcher is what sets them. `torchrun`, which comes
# with PyTorch, is the usual one. Here it starts two processes that only print what they were told.

# %% language="bash"
# torchrun --standalone --nproc-per-node=2 --no-python \
#   bash -c 'echo "rank $RANK of $WORLD_SIZE, on its host the number $LOCAL_RANK"' \
#   2> messages.txt | sort

# %% [markdown]
# Without such variables a script is its own launcher: its first process starts the others with
# `subprocess`. So `python train.py` is enough on one machine. On several, something must start the
# script on each of them. Here are the commands for two machines with eight devices each:
#
# - torchrun, on each machine: `torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d
#   --rdzv-endpoint=host0:29400 train.py`
# - SLURM, once, in the script of a job of `sbatch --nodes=2 --ntasks-per-node=8`: `srun python
#   train.py`
# - MPI, once, on one machine, with a file that names both: `mpirun -n 16 --hostfile hosts.txt
#   --map-by ppr:8:node python train.py`
#
# The script stays as it is, but for `devices` and `num_nodes` of the Trainer.
# [launchers](../docs/launchers.md) has these and more, with a file to begin with for each.
#
# ## Ask before you start
#
# Most faults of a cluster show late: a run hangs at its first collective, or cannot write its first
# checkpoint. The *doctor* looks first. Start it in place of the script, with the same launcher.

# %% language="bash"
# python -m lightning_dist doctor --strategy ddp 2> messages.txt \
#   | sed 's|/tmp/[^:]*|a new directory|' | cut -c1-100 | grep -E '^(OK|WARN|FAIL| +->|[0-9]+ OK)'

# %% [markdown]
# Each line is a check. A line with `WARN` or `FAIL` comes with a remedy;
# [doctor](../docs/doctor.md) has an example of a cluster with a slow cable and disks that are not
# shared.
#
# ## A process is killed
#
# Now the same training again, under another name. At step 20 the last rank gets SIGKILL, as it does
# when a machine runs out of memory. It cannot say a word.

# %% language="bash"
# python train.py bumpy 2 SIGKILL 20 2> messages.txt || echo "exit code $?"
# grep -E 'rank 1|SIGKILL|killed' messages.txt | head -5

# %% [markdown]
# What would have happened without care? The other ranks would wait in their next all-reduce for a
# rank that is no more, until a time-out, and then blame the network. Here the first message names
# the rank that was lost, and everything has ended within seconds.
#
# ## Go on with what is left
#
# A checkpoint was written at step 16. We start the same command, but on *one* process.
# `ckpt_path="last"` finds the newest checkpoint. A checkpoint of this package does not know how
# many ranks have written it, so any number can read it.
#
# And the batch? Two ranks took 32 samples each per step. `Elastic(replicas=2)` says so; a single
# rank then takes two batches per update. The order of the samples is drawn from the seed and the
# epoch, and the place in it is in the checkpoint. So no sample is taken twice, and none is left
# out.
#
# At step 40 this run is preempted: it gets SIGTERM, the polite signal, as from SLURM or Kubernetes
# some seconds before they take the machine.

# %% language="bash"
# python train.py bumpy 1 SIGTERM 40 2> messages.txt || echo "exit code $?"
# grep -E 'SIGTERM|Restor|resum' messages.txt | grep -v '/' | head -5

# %% [markdown]
# The run ends behind a whole step and writes a checkpoint (`save_on_exception=True`). The exit code
# 143 tells a launcher that it is not finished. With several ranks, the signal may come to any of
# them: all end behind the same step.
#
# ## And once more
#
# The last part runs under torchrun, on two processes again, to the end.

# %% language="bash"
# torchrun --standalone --nproc-per-node=2 train.py bumpy 2 none 0 2> messages.txt \
#   && echo "it has ended well"

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt

# %matplotlib inline
smooth, bumpy = (torch.load(f"{name}.ckpt")["state_dict"] for name in ("smooth", "bumpy"))
apart = max(float((smooth[name] - bumpy[name]).abs().max()) for name in smooth)
print(f"without trouble, and with all of it: largest difference of a weight {apart:.0e}")
assert apart < 1e-12

runs = {
    "smooth-2-none": ("without trouble", "#BBBBBB", 5),
    "bumpy-2-SIGKILL": ("2 processes, until one is killed", "#0072B2", 1.5),
    "bumpy-1-SIGTERM": ("1 process, until preempted", "#D55E00", 1.5),
    "bumpy-2-none": ("2 processes, under torchrun", "#009E73", 1.5),
}
figure, axes = plt.subplots(figsize=(9, 3.6), layout="constrained")
for name, (label, colour, width) in runs.items():
    rows = [json.loads(line) for line in Path(f"{name}.jsonl").read_text().splitlines()]
    axes.plot(*zip(*rows, strict=True), color=colour, linewidth=width, label=label)
axes.set(xlabel="step", ylabel="cross-entropy of rank 0's batch (nats)", ylim=(0, None))
axes.grid(alpha=0.3)
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The orange run begins behind step 16, so the steps from 17 to 20 were taken twice, with the same
# samples. Where it accumulates, it shows each of the two batches of a step. In the end the weights
# are those of the smooth run, up to the order in which sums were taken.
#
# In practice a launcher does all of this by itself: `torchrun --max-restarts=3` starts processes
# again that were killed, with `--nnodes=1:2` also on one machine fewer, and a SLURM job that ends
# with SIGTERM is queued anew. [preemption](../docs/preemption.md) says how,
# [reliability](../docs/reliability.md) how often each fault was tried, and
# [checkpoints](../docs/checkpoints.md) which layouts read which checkpoints.
#
# ## Try it
#
# - Kill rank 0 in place of the last rank. What do the others say?
# - Raise an exception on one rank. Whose traceback is printed, and how long does it take?
# - Leave `Elastic` out. Which samples does the resumed run take, and what becomes of the
#   comparison?
# - Use `FSDPStrategy()`, and `PipelineStrategy()` in the last part. Does it find the checkpoint?
