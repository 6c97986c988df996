"""What the process has imported from which all workers are forked.

Importing all of this takes each process some seconds, and a case that fails on purpose costs the
pool its processes. The interpreter's collector is told to leave it alone, for a process that ends
would look through all of it again.
"""

import gc

import pytest  # noqa: F401
import torchmetrics.classification  # noqa: F401

import lightning_dist  # noqa: F401
import tests.helpers.gpt_parity
import tests.helpers.models
import tests.helpers.oracle
import tests.helpers.workers  # noqa: F401

gc.freeze()
