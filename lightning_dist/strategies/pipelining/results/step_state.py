"""What steps leave in the module, for the hooks at the end of an epoch and for checkpoints.

Only the last stage runs a step to its end. What a step appends to a list there, or adds to a
number or a buffer of the module, ``on_validation_epoch_end`` and its like read on each rank. So the
last stage watches what its steps change, and sends that before these hooks: attributes of the
module, of plain objects in it and of modules beside the layers, and buffers outside of the layers.

What hooks change is each rank's own, but for :mod:`.outside_tensors`.

A step runs once for each micro-batch. So a counter in it, ``self.num += 1``, counts these, and a
temperature that depends on it falls too fast. To count what a micro-batch has, such as its right
predictions, is as right as on one device; so a counter is warned of, and left.
"""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_dist.engine.tensors.patch import surround_method
from lightning_dist.strategies.base.callback_order import add_first_callback
from lightning_dist.strategies.pipelining.results.outside_tensors import OutsideTensors
from lightning_dist.strategies.pipelining.results.python_state import (
    attributes_of,
    can_be_sent,
    mark,
    modules_beside,
    set_attribute_of,
)

_ENDS = (
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_test_epoch_end",
    "on_predict_epoch_end",
)
_STEPS_TO_TELL = 8


class StepState:
    """Attributes and buffers of the module that steps change on the last stage.

    Args:
        outside: What no stage has for itself.
        pipelined: The modules that are cut into stages, whose attributes are each stage's own.
        source: Global rank of the last stage.
        is_source: Whether this rank is the last stage.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        outside: OutsideTensors,
        pipelined: Collection[nn.Module],
        stages: dist.ProcessGroup,
        source: int,
        *,
        is_source: bool,
    ) -> None:
        self._module = module
        self._stages = stages
        self._source = source
        self._is_source = is_source
        self._pipelined = pipelined
        self._modules: list[tuple[str, nn.Module]] = []
        self._outside = outside
        self._buffers = outside.buffers
        self._changed: set[str] = set()
        self._replaced: set[str] = set()  # by another object
        self._grown: Counter[str] = Counter()  # items that steps have appended to lists
        self._is_shared = True
        ends: Any = dict.fromkeys(_ENDS, lambda *_: self.share())
        self._undo = [add_first_callback(module.trainer, LambdaCallback(**ends))]
        for name in _ENDS:  # a learning rate finder takes the callbacks away
            self._undo.append(surround_method(module, name, before=self.share))

    def close(self) -> None:
        """Ends the sending."""
        while self._undo:  # a cycle with the group could be freed in a forked process, and wait
            self._undo.pop()()
        self._outside.close()

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Watches a step, whether this rank runs it to its end or not."""
        if self._is_shared:  # in between, hooks may have replaced some
            self._modules = [*modules_beside(self._module, self._pipelined)]
        self._is_shared = False
        before = {name: (value, self._mark(name, value)) for name, value in self._named()}
        lengths = {n: len(value) for n, (value, _) in before.items() if isinstance(value, list)}
        try:
            yield
        finally:
            for name, value in self._named():
                old, seen = before.get(name, (before, None))
                if value is not old or self._mark(name, value) != seen:
                    self._changed.add(name)
                if value is not old:
                    self._replaced.add(name)
                if isinstance(value, list) and name in lengths:
                    self._grown[name] += len(value) - lengths[name]

    def _mark(self, name: str, value: Any) -> Any:
        return None if name in self._changed else mark(value)

    def share(self) -> None:
        """Sends what steps have changed. Collective: all stages of a replica call it."""
        if self._is_shared:  # since the last step
            return
        packed: list[bytes | None] = [None]
        if self._is_source and self._changed:
            packed = [self._pack()]
        dist.broadcast_object_list(packed, src=self._source, group=self._stages)
        if packed[0] is not None:
            self._unpack(packed[0])
        self._changed.clear()
        self._replaced.clear()
        self._grown.clear()
        self._is_shared = True

    def merge(self) -> None:
        """Takes what steps have changed, and what one stage alone has written outside of steps.

        A checkpoint may hold either. Collective: all stages of a replica call it.

        Raises:
            ValueError: As :meth:`.OutsideTensors.merge`.
        """
        self.share()
        self._outside.merge()

    def _unpack(self, packed: bytes) -> None:
        place = partial(_place, str(self._module.device))
        found = torch.load(io.BytesIO(packed), map_location=place, weights_only=False)
        for name in found["unsent"]:
            rank_zero_warn(
                f"A step has changed `self.{name}`, of which a copy cannot be pickled. So hooks at"
                " the end of an epoch have it on the last stage only."
            )
        # A list to which this rank's steps append as much is its own: that is ahead of the model.
        own = {name for name, count in found["grown"].items() if self._grown[name] == count > 0}
        for name, value in found["values"].items() if not self._is_source else ():
            if name not in own:
                self._set(name, value, is_new=name in found["replaced"])

    def _named(self) -> Iterator[tuple[str, Any]]:
        yield from attributes_of(self._module, self._modules).items()
        for name in self._buffers:
            yield name, self._module.get_buffer(name)

    def _pack(self) -> bytes:
        values = {name: value for name, value in self._named() if name in self._changed}
        unsent = [name for name, value in values.items() if not can_be_sent(value)]
        for name in unsent:
            del values[name]
        packed = io.BytesIO()
        about = {"unsent": unsent, "replaced": self._replaced, "grown": dict(self._grown)}
        torch.save({"values": values, **about}, packed)
        return packed.getvalue()

    @torch.no_grad()
    def _set(self, name: str, value: Any, *, is_new: bool) -> None:
        if name in self._buffers:
            self._module.get_buffer(name).copy_(value)
            return
        set_attribute_of(self._module, name, value, is_new=is_new)


class StepCounters:
    """Warns of what has grown by one in each of the first micro-batches."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._num_steps = 0
        self._counters: set[str] | None = None  # None until the first step

    @contextmanager
    def in_step(self, share: float) -> Iterator[None]:
        """Watches a training step that runs to its end; others pass.

        Args:
            share: Share of its batch that the micro-batch has.
        """
        is_training = torch.is_grad_enabled()
        if not is_training or share == 1.0 or self._num_steps == _STEPS_TO_TELL:
            yield
            return
        before = self._numbers()
        yield
        now = self._numbers()
        grown = {name for name in before.keys() & now.keys() if now[name] - before[name] == 1}
        self._counters = grown if self._counters is None else self._counters & grown
        self._num_steps += 1
        if self._num_steps == _STEPS_TO_TELL and self._counters:
            warnings.warn(
                f"Each step has added one to {sorted(self._counters)}, and a step runs once for"
                " each micro-batch. To count batches, do it in `on_train_batch_start`, use"
                " `batch_idx` or `self.global_step`, or set num_microbatches=1.",
                stacklevel=2,
            )

    def _numbers(self) -> dict[str, int | float]:
        named = (*vars(self._module).items(), *self._module.named_buffers(recurse=False))
        numbers: dict[str, int | float] = {}
        for name, value in named:
            if isinstance(value, int | float) and not isinstance(value, bool):
                numbers[name] = value
            elif type(value) is Tensor and value.ndim == 0:  # others may be on another stage
                numbers[name] = value.item()
        return numbers


def _place(device: str, storage: Any, location: str) -> Any:
    """Puts what was on the sender's device on this rank's."""
    on = location if location == "cpu" else device
    return torch.serialization.default_restore_location(storage, on)
