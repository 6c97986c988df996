"""What the process has imported from which all workers are forked.

Importing all of this takes each process some seconds, and a case that fails on purpose costs the
pool its processes. The interpreter's collector is told to leave it alone: imports make no garbage,
and a process that ends would look through all of it again.
"""

import gc
from importlib import import_module

gc.disable()
for name in (
    "pytest",
    "torch.distributed.checkpoint",
    "torch.export._trace",  # which torch.export imports when it is called
    "torchmetrics.classification",
    "lightning_dist",
    "tests.helpers.gpt_parity",
    "tests.helpers.networks.models",
    "tests.helpers.oracle",
    "tests.helpers.processes.workers",
):
    import_module(name)
import_module("tests.helpers.processes.entry_points").read_entry_points_once()
gc.freeze()
gc.enable()
