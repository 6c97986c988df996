"""Loggers that draw the model's graph, such as ``TensorBoardLogger(log_graph=True)``.

Lightning asks them behind the strategy's setup, on rank 0 alone. There the model is a part, or
shards, and one rank cannot run it. So they are asked while the module is whole.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from lightning_dist.engine.splitting.cut import is_cut
from lightning_dist.engine.splitting.tracing.split import is_traced
from lightning_dist.engine.tensors.dtensor import is_dtensor
from lightning_dist.engine.tensors.patch import Undo, replace_method
from lightning_dist.engine.tensors.rng import random_state_kept


def log_graphs_of_whole(trainer: pl.Trainer) -> tuple[Undo, ...]:
    """Logs the graph of a module that is whole, and leaves Lightning's own call out.

    A module without values, whose construction is deferred, has no graph to run. Nor has one that
    an earlier run has left in parts.

    Returns:
        What undoes the leaving out.
    """
    module = trainer.lightning_module
    tensors = (*module.parameters(), *module.buffers())
    has_values = not any(tensor.is_meta or is_dtensor(tensor) for tensor in tensors)
    is_whole = not (is_cut(module) or is_traced(module))
    if has_values and is_whole and trainer.is_global_zero and trainer.enable_autolog_hparams:
        with random_state_kept(torch.device("cpu")):  # ranks draw alike
            for logger in trainer.loggers:
                logger.log_graph(module)
    return tuple(
        replace_method(logger, "log_graph", lambda *_, **__: None) for logger in trainer.loggers
    )
