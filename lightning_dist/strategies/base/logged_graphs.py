"""Loggers that draw the model's graph, such as ``TensorBoardLogger(log_graph=True)``.

Lightning asks them behind the strategy's setup, on rank 0 alone. There the model is a part, or
shards, and one rank cannot run it. So they are asked while the module is whole.
"""

from __future__ import annotations

import lightning.pytorch as pl
import torch

from lightning_dist.engine.tensors.patch import Undo, replace_method
from lightning_dist.engine.tensors.rng import random_state_kept


def log_graphs_of_whole(trainer: pl.Trainer) -> tuple[Undo, ...]:
    """Logs the graph of a module that is whole, and leaves Lightning's own call out.

    A module without values, whose construction is deferred, has no graph to run.

    Args:
        trainer: The trainer of a fit.

    Returns:
        What undoes the leaving out.
    """
    module = trainer.lightning_module
    has_values = not any(p.is_meta for p in (*module.parameters(), *module.buffers()))
    if has_values and trainer.is_global_zero and trainer.enable_autolog_hparams:
        with random_state_kept(torch.device("cpu")):  # ranks draw alike
            for logger in trainer.loggers:
                logger.log_graph(module)
    return tuple(
        replace_method(logger, "log_graph", lambda *_, **__: None) for logger in trainer.loggers
    )
