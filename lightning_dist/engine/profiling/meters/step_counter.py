"""Count one step's operations, messages and activations, in any code, and a batch's samples.

All operations pass torch's dispatcher, those of autograd too, but for operations inside of a
compiled kernel. Watching each operation is slow, so such a step is not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.traffic import TrafficLedger
from lightning_dist.engine.profiling.meters.memory import ActivationMeter, WeightsInUse
from lightning_dist.engine.profiling.meters.traffic_counter import TrafficCounter, packet_of
from lightning_dist.engine.profiling.record import StepCount
from lightning_dist.engine.tensors.observers import OperationWatch, Watch
from lightning_dist.engine.tensors.samples import batch_size_of, split_off_lists
from lightning_dist.engine.tensors.tree import tensors_in

_TOKENS = ("input_ids", "tokens")


def num_samples(batch: Any) -> int:
    """Counts the samples of a batch, of any tree; 0 if it tells of none."""
    outside, lists = split_off_lists(batch)
    lengths, rows = {len(found) for found in lists}, {t.shape[:1] for found in lists for t in found}
    if len(lengths) == 1 and len(rows) > 1 and not tensors_in(outside):
        return lengths.pop()  # images of several sizes, or images and numbers: one for each sample
    try:
        return batch_size_of(batch) or 0
    except ValueError:  # no strategy here need cut it
        tensors = [*tensors_in(outside), *tensors_in(batch)]
        return next(t.shape[0] for t in tensors if t.dim() > 0)


def num_tokens(batch: Any) -> int | None:
    """Counts the elements of a batch's ``input_ids`` or ``tokens``; None without such a tensor."""
    for name in _TOKENS:
        found = batch.get(name) if isinstance(batch, Mapping) else getattr(batch, name, None)
        if isinstance(found, Tensor):
            return found.numel()
    return None


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Counts two products: scores, and their means of values; causal or not, as torch does."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """Counts five products: scores again, and the gradients of scores, queries, keys, values."""
    pairs = query.shape[:-1].numel() * key.shape[-2]
    return 2 * pairs * (3 * query.shape[-1] + 2 * value.shape[-1])


# Torch has formulas of the GPU's kernels of attention, but of the CPU's none.
_CPU_FORMULAS = MappingProxyType(
    {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
            _attention_backward_flops
        ),
    }
)


class FlopCounter:
    """Sums the FLOPs of operations by torch's formulas; those without one count nothing.

    They are those of ``torch.utils.flop_counter``, with those that users have added by its
    ``register_flop_formula``, and two for attention on a CPU. Torch's own ``FlopCounterMode`` makes
    a step four times as long, as it tries to decompose each operation and tracks modules. Under
    that mode jagged tensors fail, and compiled code is not compiled any more, then or later.
    """

    def __init__(self) -> None:
        self._formulas = {**_CPU_FORMULAS, **FlopCounterMode(display=False).flop_registry}
        self.flops = 0

    def counts(self, func: Any) -> bool:
        """Returns whether an operation of torch has a formula."""
        return packet_of(func) in self._formulas

    def __call__(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Adds the FLOPs of an operation that has a formula, given its arguments and result."""
        formula = self._formulas.get(packet_of(func))
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)


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
        # What torch.compile says of the hooks, and torch 2.12 of what is not compiled here.
        warnings.filterwarnings("ignore", r".*(when there are global hooks|no compiled frames)")
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
