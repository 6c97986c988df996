"""What the user logs on the last stage, made known to all ranks.

Only the last stage reaches the ``self.log`` calls of a step, once per micro-batch. The calls are
recorded there instead of made; at the end of the batch they are combined over the micro-batches,
sent to the other stages, and made on each rank. So the progress bar, the loggers and callbacks that
monitor a metric see the same numbers everywhere, and the ones that an undivided batch would give
(for means, sums, minima and maxima, by the call's own ``reduce_fx``). Data replicas agree too: each
call is made with ``sync_dist=True``, which costs nothing where there is one replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import signature
from numbers import Number
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dist.pipeline.microbatch import mean_of
from lightning_dist.replaced_method import replace_method
from lightning_dist.shards import whole
from lightning_dist.strategies.lightning_private import set_step_value, step_value


@dataclass(frozen=True, slots=True)
class LogCall:
    """One ``self.log`` call, without its value.

    Attributes:
        name: What is logged.
        options: The other arguments of the call.
        dtype: Of the logged tensor.
        metric: Name of the logged torchmetrics object in the module, None for plain values.
        batch_size: The call's own batch size, or None.
    """

    name: str
    options: dict[str, Any]
    dtype: torch.dtype
    metric: str | None = None
    batch_size: int | None = None

    @property
    def reduction(self) -> str:
        """How Lightning reduces the values of several batches."""
        reduce_fx = self.options.get("reduce_fx", "mean")
        return reduce_fx if isinstance(reduce_fx, str) else reduce_fx.__name__


@dataclass(frozen=True, slots=True)
class BatchLog:
    """The calls of one batch and their values, combined over its micro-batches.

    Attributes:
        calls: Static from step to step, so that the transport sends them once.
        values: One float64 number per call; nan for a metric without a value for the step.
        num_samples: Samples of the batch.
    """

    calls: tuple[LogCall, ...]
    values: Tensor
    num_samples: int


@dataclass(slots=True)
class _Size:
    """What a micro-batch's values weigh, which may be known only when its step is over."""

    value: float


@dataclass(slots=True)
class _Recorded:
    call: LogCall
    values: list[float] = field(default_factory=list)
    sizes: list[_Size] = field(default_factory=list)

    def combine(self) -> float:
        if not self.values:
            return float("nan")
        if self.call.reduction in _EXTREMES:
            return _EXTREMES[self.call.reduction](self.values)
        if self.call.reduction == "sum":
            return sum(self.values)
        return float(mean_of(self.values, [size.value for size in self.sizes]))


_OPTIONS = tuple(signature(pl.LightningModule.log).parameters)[3:]
"""Names of what ``self.log`` takes after a name and a value, in their order."""

_EXTREMES: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "amax": max,
    "min": min,
    "amin": min,
}


class StepLog:
    """Records and replays a module's ``self.log`` calls.

    Args:
        module: The user's module.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._metric_names = {
            id(m): name for name, m in module.named_modules() if isinstance(m, Metric)
        }
        self._recorded: dict[str, _Recorded] = {}
        self._size = _Size(0)

    @contextmanager
    def recording(self, num_samples: int) -> Iterator[None]:
        """Records the calls made inside, for one micro-batch.

        Args:
            num_samples: Samples of the micro-batch.

        Yields:
            Nothing.
        """
        self._size = _Size(num_samples)
        undo = replace_method(self._module, "log", self._record)
        try:
            yield
        finally:
            undo()

    def weigh(self, weight: float) -> None:
        """Gives the micro-batch at hand a weight in the place of its samples.

        Means that are logged with a ``batch_size`` of their own keep that.

        Args:
            weight: What the step's loss is a mean over.
        """
        self._size.value = weight

    def take(self, num_samples: int) -> BatchLog:
        """Combines what was recorded since the last call.

        Args:
            num_samples: Samples of the batch.
        """
        recorded, self._recorded = list(self._recorded.values()), {}
        values = torch.tensor([r.combine() for r in recorded], dtype=torch.float64)
        calls = tuple(r.call for r in recorded)
        return BatchLog(calls, values, num_samples)

    def forget(self) -> None:
        """Drops what was recorded, after a failure."""
        self._recorded = {}

    def replay(self, log: BatchLog) -> None:
        """Makes the calls of one batch.

        Args:
            log: What :meth:`take` gave on the last stage.
        """
        for call, value in zip(log.calls, log.values.tolist(), strict=True):
            tensor = torch.tensor(value, dtype=call.dtype, device=self._module.device)
            logged: Tensor | Metric = tensor
            if call.metric is not None:
                logged = self._metric(call.metric)
                set_step_value(logged, tensor)
            options = {"batch_size": call.batch_size or log.num_samples, **call.options}
            if not options.get("rank_zero_only"):
                options["sync_dist"] = True
            self._module.log(call.name, logged, **options)

    def _metric(self, name: str) -> Metric:
        metric = self._module.get_submodule(name)
        assert isinstance(metric, Metric)
        return metric

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(_OPTIONS, args, strict=False))
        if options.get("sync_dist_group") is not None:
            raise ValueError(
                f"self.log({name!r}, sync_dist_group=...) cannot be replayed on other ranks. Leave"
                " it out: `sync_dist=True` reduces over the data replicas."
            )
        batch_size = options.pop("batch_size", None)
        number, dtype, metric = self._number_of(name, value)
        entry = self._recorded.get(name)
        total = batch_size
        if entry is not None and batch_size is not None:
            total = (entry.call.batch_size or 0) + batch_size
        call = LogCall(name, options, dtype, metric, total)
        if entry is None:
            entry = self._recorded[name] = _Recorded(call)
        entry.call = call
        if number is not None:
            entry.values.append(number)
            entry.sizes.append(self._size if batch_size is None else _Size(batch_size))

    def _number_of(self, name: str, value: Any) -> tuple[float | None, torch.dtype, str | None]:
        if isinstance(value, Metric):
            if id(value) not in self._metric_names:
                raise ValueError(
                    f"self.log({name!r}, metric): the metric is not an attribute of the module."
                    " Assign it in `__init__`, so that each rank has it under the same name."
                )
            present = step_value(value)
            number = float(present) if isinstance(present, Tensor) else None
            return number, torch.get_default_dtype(), self._metric_names[id(value)]
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"self.log({name!r}, tensor) takes a tensor of one element, not of shape"
                    f" {tuple(value.shape)}. Log its mean, or a torchmetrics object."
                )
            # A mean of whole numbers need not be whole; Lightning makes them floating as well.
            is_floating = value.is_floating_point()
            dtype = value.dtype if is_floating else torch.get_default_dtype()
            return float(whole(value.detach())), dtype, None
        if not isinstance(value, Number):
            pl.LightningModule.log(self._module, name, value)  # says what can be logged
        return float(value), torch.get_default_dtype(), None
