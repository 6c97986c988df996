"""The values that the user logs on the last stage, made known to all ranks.

Only the last stage reaches the ``self.log`` calls of a step, once per micro-batch. The calls are
recorded there, combined over the micro-batches, sent to the other stages, and made on each rank. So
progress bar, loggers and callbacks see the same numbers everywhere; data replicas agree by
``sync_dist=True``.

A call's ``reduce_fx`` is over batches. Over the micro-batches of one batch a value is averaged by
samples. Integers, and sums whose first values are whole, count something: they are reduced by
``reduce_fx`` over the micro-batches too.

Values of a GPU stay there, as numbers of no dim, so that logging does not wait for the GPU.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_dist.engine.pipeline.microbatch import mean_of
from lightning_dist.engine.tensors.dtensor import whole
from lightning_dist.engine.tensors.patch import replace_method
from lightning_dist.strategies.base.lightning_internals import set_step_value, step_value

Number: TypeAlias = float | Tensor
"""A logged value: a number on the host, or a float64 tensor of no dim on another device."""


@dataclass(frozen=True, slots=True)
class LogCall:
    """One ``self.log`` call, without its value.

    Attributes:
        dtype: Dtype of the logged tensor.
        metric: Name of the logged torchmetrics object in the module, None for plain values.
        batch_size: Weight of the batch by the call's own batch sizes, or None.
        has_value: Whether there is a value for the step; a metric may only have been updated.
    """

    name: str
    options: dict[str, Any]
    dtype: torch.dtype
    metric: str | None = None
    batch_size: float | None = None
    has_value: bool = True


@dataclass(frozen=True, slots=True)
class BatchLog:
    """The calls of one batch and their values, combined over its micro-batches.

    Attributes:
        calls: The calls, static from step to step, so that the transport sends them once.
        values: One float64 number per call; nan for a metric without a value for the step.
    """

    calls: tuple[LogCall, ...]
    values: Tensor
    num_samples: int


@dataclass(slots=True)
class GivenSize:
    """Finds the weight of a batch whose micro-batches one ``self.log`` call gives a ``batch_size``.

    ``batch_size=len(y)`` counts items of the micro-batch; the batch weighs their sum.
    ``batch_size=1`` is a constant; the batch weighs the same however many micro-batches it has. One
    batch with equal micro-batches does not tell the two apart, and need not, for only weights
    relative to other batches matter. A batch that is cut otherwise tells.

    Attributes:
        counts: Whether the sizes count items of a micro-batch; None while that is unknown.
        first: Number of micro-batches in the first batch; samples and given size of its first one.
    """

    counts: bool | None = None
    first: tuple[int, int, float] | None = None

    def weights_of(self, rows: Sequence[int], given: Sequence[float]) -> tuple[list[float], float]:
        """Returns the weights of a batch and its micro-batches, and remembers its sizes.

        Returns:
            The weight of each micro-batch in the batch, and of the batch among others.
        """
        self.first = self.first or (len(rows), rows[0], given[0])
        num_pieces, first_rows, first_given = self.first
        if any(size != first_given for size in given):
            self.counts = True
        elif self.counts is None and any(number != first_rows for number in rows):
            self.counts = False
        counts = self.counts
        if counts is None:
            # So far all micro-batches were equal. Their weights are, too, but for a smaller batch.
            counts = first_given != first_rows * num_pieces or num_pieces == 1
        if counts:
            return list(given), sum(given)
        return [float(number) for number in rows], first_given * num_pieces


@dataclass(slots=True)
class _Microbatch:
    num_samples: int
    weight: float  # of its means, which may be known only when the step is over


@dataclass(frozen=True, slots=True)
class _Logged:
    call: LogCall
    is_whole: bool  # of an integer type
    value: Number | None
    given: float | None  # the user's batch_size
    microbatch: _Microbatch


def _count_something(logged: Sequence[_Logged]) -> bool:
    """Returns whether the values, the first of their name, count something."""
    values = [each.value for each in logged if each.value is not None]
    is_sum = logged[0].call.options["reduce_fx"] == "sum"
    return logged[0].is_whole or (is_sum and all(float(value).is_integer() for value in values))


def _combined(
    logged: Sequence[_Logged], given_size: GivenSize, *, counts: bool
) -> tuple[LogCall, Number]:
    call, known = logged[-1].call, [each for each in logged if each.value is not None]
    if not known:
        return replace(call, has_value=False), float("nan")
    values = [each.value for each in known if each.value is not None]
    weights = [each.microbatch.weight for each in known]
    sizes = [each.given for each in known if each.given is not None]
    if sizes:
        rows = [each.microbatch.num_samples for each in known]
        given, total = given_size.weights_of(rows, sizes)
        call = replace(call, batch_size=total)
        weights = given if given_size.counts else weights
    reduce = _OF_COUNTS.get(call.options["reduce_fx"]) if counts else None
    return call, mean_of(values, weights) if reduce is None else reduce(values)


_Turn: TypeAlias = tuple[str, int]
"""The name of a call, and how many calls of a step for a micro-batch have had it before."""

_OPTIONS = tuple(signature(pl.LightningModule.log).parameters)[3:]
"""Names of the arguments of ``self.log`` after the name and the value, in order."""

_OF_COUNTS: dict[str, Callable[[Sequence[Number]], Number]] = {
    "sum": sum,
    "max": lambda values: max(map(float, values)),
    "min": lambda values: min(map(float, values)),
}
"""The functions that combine integers of micro-batches; other values are averaged."""

_REDUCTIONS: dict[Any, str] = {
    "avg": "mean",
    **{name: name for name in ("mean", "sum", "max", "min")},
    **{getattr(torch, name): name for name in ("mean", "sum", "max", "min")},
    **{reduce: reduce.__name__ for reduce in (sum, max, min)},
}
"""The name of each ``reduce_fx`` that Lightning takes; ranks send the name."""


def reduction_of(name: str, reduce_fx: Any) -> str:
    """Returns the name of a reduction.

    Raises:
        ValueError: Lightning does not know it.
    """
    key = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    if key not in _REDUCTIONS:
        raise ValueError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): only 'mean', 'sum', 'max' and 'min' are"
            " supported, as on a single device. For another reduction log a `torchmetrics.Metric`."
        )
    return _REDUCTIONS[key]


class StepLog:
    """Records and replays a module's ``self.log`` calls."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module = module
        self._metric_names = {
            id(m): name for name, m in module.named_modules() if isinstance(m, Metric)
        }
        # A step that is compiled is compiled without this code.
        self._log = torch.compiler.disable(self._record)
        self._recorded: dict[_Turn, list[_Logged]] = {}
        self._made: list[_Logged] = []
        self._microbatch = _Microbatch(0, 0.0)
        self._given_sizes: dict[tuple[Hashable, _Turn], GivenSize] = {}
        self._counts: dict[tuple[Hashable, _Turn], bool] = {}

    @contextmanager
    def recording(self, num_samples: int) -> Iterator[None]:
        """Records the calls made inside, for one micro-batch.

        The calls of a step that is left before its end are dropped: the last stage makes them too.
        """
        self._microbatch = _Microbatch(num_samples, num_samples)
        self._made = []
        undo = replace_method(self._module, "log", self._log)
        try:
            yield
            turns: Counter[str] = Counter()  # a step may log a name several times
            for each in self._made:
                name = each.call.name
                self._recorded.setdefault((name, turns[name]), []).append(each)
                turns[name] += 1
        finally:
            undo()

    def weigh(self, weight: float) -> None:
        """Sets the weight of the present micro-batch, in the place of its number of samples.

        Means that are logged with a ``batch_size`` that counts something else keep that weight.

        Args:
            weight: The weight: the number of items that the step's loss is a mean over.
        """
        self._microbatch.weight = weight

    def take(self, num_samples: int, step: Hashable = None) -> BatchLog:
        """Combines the calls that were recorded since the last call.

        Args:
            num_samples: Number of samples in the batch.
            step: Key of the step and its loader, whose batches are weighed against each other.
        """
        recorded, self._recorded = self._recorded, {}
        combined = []
        for turn, logged in recorded.items():
            size = self._given_sizes.setdefault((step, turn), GivenSize())
            if (step, turn) not in self._counts:  # reads the values, so only once
                self._counts[step, turn] = _count_something(logged)
            combined.append(_combined(logged, size, counts=self._counts[step, turn]))
        values = _joined([value for _, value in combined])
        return BatchLog(tuple(call for call, _ in combined), values, num_samples)

    def forget(self) -> None:
        """Drops the recorded calls, after a failure."""
        self._recorded = {}

    def replay(self, log: BatchLog) -> None:
        """Calls ``self.log`` for each call of one batch."""
        is_here = log.values.device.type == "cpu"
        values = log.values.tolist() if is_here else log.values.unbind()
        for call, value in zip(log.calls, values, strict=True):
            tensor = _tensor_of(value, call.dtype, self._module.device)
            logged: Tensor | Metric = tensor
            if call.metric is not None:
                metric = self._module.get_submodule(call.metric)
                assert isinstance(metric, Metric)
                set_step_value(metric, tensor if call.has_value else None)
                logged = metric
            size = log.num_samples if call.batch_size is None else call.batch_size
            options = {"batch_size": size, **call.options}
            if not options.get("rank_zero_only"):
                options["sync_dist"] = True
            self._module.log(call.name, logged, **options)

    def _record(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options.update(zip(_OPTIONS, args, strict=False))
        if options.get("sync_dist_group") is not None:
            raise ValueError(
                f"self.log({name!r}, sync_dist_group=...) cannot be replayed on other ranks. Leave"
                " it out: `sync_dist=True` reduces over the data replicas."
            )
        options["reduce_fx"] = reduction_of(name, options.get("reduce_fx", "mean"))
        batch_size = options.pop("batch_size", None)
        number, dtype, metric = self._number_of(name, value)
        is_whole = metric is None and _is_whole(value)
        size = batch_size.item() if isinstance(batch_size, Tensor) else batch_size
        call = LogCall(name, options, dtype, metric)
        self._made.append(_Logged(call, is_whole, number, size, self._microbatch))

    def _number_of(self, name: str, value: Any) -> tuple[Number | None, torch.dtype, str | None]:
        if isinstance(value, Metric):
            if id(value) not in self._metric_names:
                raise ValueError(
                    f"self.log({name!r}, metric): the metric is not an attribute of the module."
                    " Assign it in `__init__`, so that each rank has it under the same name."
                )
            present = step_value(value)
            name = self._metric_names[id(value)]
            if not isinstance(present, Tensor):
                return None, torch.get_default_dtype(), name
            return _number(present.detach()), _floating(present.dtype), name
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"self.log({name!r}, tensor) takes a tensor of one element, not of shape"
                    f" {tuple(value.shape)}. Log its mean, or a torchmetrics object."
                )
            return _number(whole(value.detach())), _floating(value.dtype), None
        if not isinstance(value, numbers.Number):
            pl.LightningModule.log(self._module, name, value)  # raises, and lists the types it logs
        return float(value), torch.get_default_dtype(), None


def _number(value: Tensor) -> Number:
    return float(value) if value.device.type == "cpu" else value.reshape(()).double()


def _tensor_of(value: Number, dtype: torch.dtype, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)


def _joined(values: Sequence[Number]) -> Tensor:
    device = next((v.device for v in values if isinstance(v, Tensor)), None)
    if device is None:
        return torch.tensor(values, dtype=torch.float64)
    return torch.stack([_tensor_of(value, torch.float64, device) for value in values])


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() and value.dtype != torch.bool
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _floating(dtype: torch.dtype) -> torch.dtype:
    """Returns the floating dtype of a mean; Lightning's means are floating as well."""
    return dtype if dtype.is_floating_point else torch.get_default_dtype()
