"""Log how stale the weights of each stage are; see ``PipelineStrategy(log_staleness=True)``.

Each stage knows its own numbers, when it updates, and the first stage updates for a batch
``num_stages - 1`` batches after the last one. So at each update a stage adds its row to an
asynchronous all-reduce, and reads that of an earlier batch, for which each stage has updated since.
No rank waits, and all ranks log the same numbers at the same step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.pipeline.pipeline import Pipeline

STALENESS = "staleness"
STASH_BYTES = "stash_bytes"
DISCREPANCY = "weight_discrepancy"


class StalenessLog:
    """Exchanges the stages' reports and logs them on all stages.

    Args:
        group: A gloo group of the stages, used for nothing else.
        names: The values to log; the pipeline must measure ``DISCREPANCY``.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        pipeline: Pipeline,
        group: dist.ProcessGroup,
        names: Collection[str],
    ) -> None:
        self._module = module
        self._pipeline = pipeline
        self._group = group
        self._names = names
        self._posted: deque[tuple[int, dist.Work, Tensor]] = deque()  # with the batch
        self._newest: Tensor | None = None

    def post(self) -> None:
        """Starts the all-reduce of an update's reports, and returns at once."""
        # In double precision, which holds the count of bytes of any model.
        values = torch.zeros(self._pipeline.shape.num_stages, len(self._names), dtype=torch.float64)
        for stage, report in self._pipeline.stages.reports.items():
            by_name = {
                STALENESS: report.staleness,
                STASH_BYTES: report.stash_bytes,
                DISCREPANCY: report.discrepancy or 0.0,
            }
            values[stage] = values.new_tensor([by_name[name] for name in self._names])
        work = dist.all_reduce(values, group=self._group, async_op=True)
        assert work is not None
        self._posted.append((self._pipeline.gradients_of_batch, work, values))

    def log(self) -> None:
        """Logs the newest numbers that all stages have; to be called at the end of each batch."""
        while self._posted and self._is_everywhere(self._posted[0][0]):
            self._take()
        if self._newest is None:
            return
        for stage, row in enumerate(self._newest):
            for name, value in zip(self._names, row, strict=True):
                self._module.log(f"{name}/stage_{stage}", value, on_step=True, batch_size=1)

    def finish(self) -> None:
        """Waits for the pending all-reduces, when all stages have updated for all batches."""
        while self._posted:
            self._take()

    def _take(self) -> None:
        _, work, self._newest = self._posted.popleft()
        work.wait()

    def _is_everywhere(self, batch: int) -> bool:
        """Returns whether each stage has surely updated for a batch, some time ago."""
        present = self._pipeline.num_batches - 1
        first_since_drain = present + 1 - self._pipeline.batches_since_drain
        # The activation of batch `batch + lag + 1` was sent when the first stage had updated.
        return batch < first_since_drain or present > batch + self._pipeline.lag + 1
