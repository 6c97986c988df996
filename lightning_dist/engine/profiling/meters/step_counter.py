"""Count one step's operations, messages and activations, in any code.

All operations pass torch's dispatcher, those of autograd too, but for operations inside of a
compiled kernel. Watching each operation is slow, so such a step is not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.traffic import TrafficLedger
from lightning_dist.engine.profiling.meters.flops import FlopCounter
from lightning_dist.engine.profiling.meters.memory import ActivationMeter, WeightsInUse
from lightning_dist.engine.profiling.meters.traffic_counter import TrafficCounter
from lightning_dist.engine.profiling.record import StepCount
from lightning_dist.engine.tensors.observers import OperationWatch, Watch


class StepCounter:
    """Counts from :meth:`start` to :meth:`stop`; the mesh gives the axes of a message.

    The parameters' memory is no activation.
    """

    def __init__(self, mesh: MeshShape, parameters: Iterable[Tensor]) -> None:
        self._ledger = TrafficLedger()
        self._traffic = TrafficCounter(self._ledger, mesh)
        self._flops = FlopCounter()
        self._counters: dict[Any, list[Watch]] = {}
        self._operations = OperationWatch(self._look)
        self._weights = WeightsInUse(parameters)
        self._activations = ActivationMeter((), self._weights)
        self._stack = ExitStack()

    def start(self) -> None:
        """Begins to count."""
        # Nothing is compiled for this step; code that is compiled already is used as such.
        self._stack.enter_context(torch.compiler.set_stance("eager_on_recompile"))
        self._stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", r".*when there are global hooks")  # torch.compile's
        for part in (self._weights, self._activations, self._operations):
            self._stack.enter_context(part)

    def _look(self, func: Any, *call: Any) -> None:
        counters = self._counters.get(func)
        if counters is None:  # most operations are of no interest, and there are thousands
            counters = [c for c in (self._traffic, self._flops) if c.counts(func)]
            self._counters[func] = counters
        for counter in counters:
            counter(func, *call)

    def stop(self) -> None:
        """Ends the counting, if it has begun."""
        self._stack.close()

    def count(self, num_steps: int, num_forwards: int) -> StepCount:
        """Returns the counts per step, for a number of counted steps and of forwards in each."""
        return StepCount(
            flops=self._flops.flops // num_steps,
            traffic=tuple(
                replace(each, count=each.count // num_steps, num_bytes=each.num_bytes // num_steps)
                for each in self._ledger.traffic
            ),
            activation_bytes=self._activations.peak_bytes,
            forward_bytes=self._activations.total_bytes // (num_steps * num_forwards),
        )
