"""Calls of the model outside of steps: a callback that draws samples at the end of an epoch, say.

The layers are on several ranks, so all stages must make the call. It runs forward only, and each
rank gets the last stage's output.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.base.distributed import DistributedStrategy
from lightning_dist.strategies.base.run_setup import ChangeStep

_MOST_SECONDS = 120.0  # that a rank waits for others, which may write files in the same hook


class OutsideCalls:
    """Runs calls of the pipelined module that no step makes.

    Args:
        source: Global rank of the last stage.
    """

    def __init__(
        self,
        strategy: DistributedStrategy,
        pipeline: Pipeline,
        source: int,
        *,
        change_step: ChangeStep,
        finish: Callable[[], None],
    ) -> None:
        self._strategy = strategy
        self._pipeline = pipeline
        self._group = strategy.group("pp")
        self._source = source
        self._change_step, self._finish = change_step, finish
        self._timeout = timedelta(seconds=min(strategy.timeout_seconds, _MOST_SECONDS))

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Returns the module's output, without a graph. Collective: every stage must call it.

        Raises:
            ValueError: A loader makes the call, batches are in flight, or another stage does not
                make it.
        """
        pipeline = self._pipeline
        if self._strategy.is_reading:
            raise ValueError(
                "A loader calls the model to make its batches, as reinforcement learning does. Its"
                " layers are on several ranks, of which one reads. Make the samples in a hook that"
                " all ranks run, such as `on_train_epoch_start`; or pass read='each', if all ranks"
                " draw the same samples; or use DDPStrategy."
            )
        if pipeline.asynchronous and pipeline.batches_since_drain:
            raise ValueError(
                f"The model was called in a hook while schedule={pipeline.shape.schedule!r} has"
                " batches in flight. Call it in a step, in a hook of a validation, or in"
                " `on_train_end`."
            )
        self._meet()
        # Not the module itself: its hooks run around this call already.
        call = self._change_step(pipeline.stages.found.module.forward)
        with torch.inference_mode(False), torch.no_grad():
            try:
                results = pipeline.evaluate_batch(None, lambda _: call(*arguments, **keywords), 1)
            finally:
                self._finish()
        sent = [map_tensors(Tensor.cpu, results[0]) if results else None]
        dist.broadcast_object_list(sent, src=self._source, group=self._group)
        return map_tensors(lambda tensor: tensor.to(self._strategy.root_device), sent[0])

    def _meet(self) -> None:
        try:
            dist.monitored_barrier(self._group, self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise ValueError(
                "The model was called outside of a step, and other stages have not called it"
                f" within {self._timeout.total_seconds():g} s. Its layers are on several ranks, so"
                " all must: not behind `if trainer.is_global_zero`, nor `@rank_zero_only`."
                f" ({str(error).splitlines()[0]})"
            ) from error
