"""Times the layers of one rank's stages while they train.

Hooks on a layer time its forward. A layer's backward begins when the gradient of its output
arrives, and ends where that of the layer before begins, or with the stage's. Nothing waits, and
nothing is computed until :meth:`LayerProfiler.profile` sorts the marks into the recorder's spans.
Where a schedule splits backwards, the time of the weights' part is distributed over the layers in
the proportions of the inputs' part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_dist.engine.planning.layer_costs import LayerCosts, RankProfile
from lightning_dist.engine.profiling.meters.memory import ActivationMeter
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.timeline import Span, SpanKind
from lightning_dist.engine.splitting.layers import Part
from lightning_dist.engine.stashing.half_versions import HalfWeights
from lightning_dist.engine.stashing.versions import version_bytes
from lightning_dist.engine.tensors.compiler import PausedCompiler
from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.observers import CallWatch
from lightning_dist.engine.tensors.tree import tensors_in

_BACKWARDS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


class _Sizes(NamedTuple):
    """Bytes of a layer's output and of what its graph keeps, and how much of that others keep."""

    sent: int = 0
    kept: int = 0
    shared: int = 0


class LayerProfiler:
    """Watches the parts of a rank's layers from :meth:`start` to :meth:`stop`.

    The stages' compiler is paused meanwhile: no hook runs inside of a stage's graph.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        recorder: Recorder,
        half: HalfWeights | None = None,
        compiler: PausedCompiler | None = None,
    ) -> None:
        self._compiler = compiler or PausedCompiler()
        self._parts = parts
        self._half = half
        self._recorder = recorder
        self._begun: dict[int, Any] = {}
        self._forwards: list[tuple[int, Any, Any]] = []
        self._gradients: list[tuple[int, Any]] = []
        self._meters: dict[int, ActivationMeter] = {}
        self._sizes: dict[int, _Sizes] = {}
        self._before: list[ActivationMeter] = []  # of layers of the same forward
        self._watches: list[CallWatch] = []
        self._start = recorder.mark()

    def start(self) -> None:
        """Begins to watch, and discards earlier measurements."""
        self.stop()
        self._compiler.stays_paused = True
        for store in (self._begun, self._forwards, self._gradients, self._sizes):
            store.clear()
        for index, part in enumerate(self._parts):
            before, after = partial(self._begin, index), partial(self._end, index)
            self._watches.append(CallWatch(part.module, before, after))
        self._start = self._recorder.mark()

    def stop(self) -> None:
        """Removes the hooks from the layers."""
        self._compiler.stays_paused = False
        for watch in self._watches:
            watch.remove()
        self._watches.clear()
        self._before.clear()

    def profile(self, states: Mapping[Tensor, Any] | None = None) -> RankProfile:
        """Returns what was measured; on a GPU waits for the device.

        Args:
            states: The optimizer's state of each parameter; None if there is none.
        """
        forwards, own_forwards = self._of_forwards()
        backwards, own_backwards = self._of_backwards()
        updates = self._spans(SpanKind.UPDATE)
        steps = [
            after.end_seconds - before.end_seconds
            for stretch in self._stretches(SpanKind.UPDATE)  # no evaluation is between two updates
            for before, after in pairwise(stretch)
        ]
        of_layers: dict[int, list[LayerCosts]] = defaultdict(list)
        before: set[nn.Parameter] = set()
        for index, part in enumerate(self._parts):
            parameters = set(part.module.parameters())
            own = copied = version_bytes(part.module.parameters())
            beside = 0
            if self._half is not None:
                beside = copied = version_bytes(part.module.parameters(), self._half.dtype_of)
            sizes = self._sizes.get(index, _Sizes())
            costs = LayerCosts(
                part.name,
                forward_seconds=_median(forwards[index]),
                backward_seconds=_median(backwards[index]),
                boundary_bytes=sizes.sent,
                parameter_bytes=own,
                tied_bytes=version_bytes(parameters & before),
                frozen_bytes=_bytes_of(p for p in parameters if not p.requires_grad),
                buffer_bytes=_bytes_of(part.module.buffers()),
                activation_bytes=sizes.kept,
                shared_bytes=sizes.shared,
                resident_bytes=_resident_bytes(part.module, states or {}) + beside,
                version_bytes=copied,
            )
            of_layers[part.layer_index].append(costs)
            before |= parameters
        return RankProfile(
            layers={layer: LayerCosts.of_parts(parts) for layer, parts in of_layers.items()},
            own_forward_seconds={stage: _median(s) for stage, s in own_forwards.items()},
            own_backward_seconds={stage: _median(s) for stage, s in own_backwards.items()},
            update_seconds=_median([span.duration_seconds for span in updates]),
            step_seconds=median(steps) if steps else float("nan"),
        )

    def _begin(self, index: int, layer: nn.Module, _: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if index not in self._sizes and index not in self._meters:
            own = (local_part(p.detach()) for p in layer.parameters())
            self._meters[index] = ActivationMeter(own).__enter__()
        self._begun[index] = self._recorder.mark()

    def _end(self, index: int, _: nn.Module, __: Any, output: Any) -> None:
        start = self._begun.pop(index, None)
        if start is None:
            return
        self._forwards.append((index, start, self._recorder.mark()))
        tensors = tensors_in(output)
        if index not in self._sizes:
            meter = self._meters.pop(index)
            meter.__exit__()
            sent, shared = sum(t.nbytes for t in tensors), meter.shared_bytes(self._before)
            self._sizes[index] = _Sizes(sent, meter.num_bytes, shared)
            self._before.append(meter)
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._arrive, index))

    def _arrive(self, index: int, _: Tensor) -> None:
        self._gradients.append((index, self._recorder.mark()))

    def _spans(self, kind: SpanKind) -> list[Span]:
        return sorted(chain(*self._stretches(kind)), key=lambda span: span.start_seconds)

    def _stretches(self, kind: SpanKind) -> list[list[Span]]:
        begin = self._recorder.seconds(self._start)
        return [
            [span for span in spans if span.kind is kind and span.start_seconds >= begin]
            for spans in self._recorder.stretches().values()
        ]

    def _of_forwards(self) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        seconds = self._recorder.seconds
        marks = sorted((seconds(start), seconds(end), i) for i, start, end in self._forwards)
        of_layers: dict[int, list[float]] = defaultdict(list)
        own: dict[int, list[float]] = defaultdict(list)
        spans = [s for s in self._spans(SpanKind.COMPUTE) if s.action.kind is ActionKind.FORWARD]
        for span, inside in _sort_into(spans, marks):
            for start, end, index in inside:
                of_layers[index].append(end - start)
            in_layers = sum(end - start for start, end, _ in inside)
            own[span.action.stage_index].append(span.duration_seconds - in_layers)
        return of_layers, own

    def _of_backwards(self) -> tuple[dict[int, list[float]], dict[int, list[float]]]:
        marks = sorted((self._recorder.seconds(mark), index) for index, mark in self._gradients)
        of_layers: dict[int, list[float]] = defaultdict(list)
        own: dict[int, list[float]] = defaultdict(list)
        spans = self._spans(SpanKind.COMPUTE)
        whole_share = _shares_of_weights(spans)
        for span, inside in _sort_into([s for s in spans if s.action.kind in _BACKWARDS], marks):
            last_of = {index: begin for begin, index in inside}  # of several tensors, the last
            begins = [*sorted((begin, index) for index, begin in last_of.items())]
            ends = [*(begin for begin, _ in begins[1:]), span.end_seconds]
            stage = span.action.stage_index
            for (begin, index), end in zip(begins, ends, strict=True):
                of_layers[index].append((end - begin) * whole_share[stage])
            own[stage].append((begins[0][0] - span.start_seconds) * whole_share[stage])
        return of_layers, own


def _sort_into(spans: Iterable[Span], marks: list[Any]) -> Iterable[tuple[Span, list[Any]]]:
    """Yields each span with the marks inside it, both in order; spans without any are omitted."""
    at = 0
    for span in spans:
        while at < len(marks) and marks[at][0] < span.start_seconds:
            at += 1
        inside = []
        while at < len(marks) and marks[at][0] <= span.end_seconds:
            inside.append(marks[at])
            at += 1
        if inside:
            yield span, inside


def _shares_of_weights(spans: Iterable[Span]) -> dict[int, float]:
    """Returns the factor, by stage, that turns a timed backward's seconds into a whole one's."""
    inputs: dict[int, float] = defaultdict(float)
    weights: dict[int, float] = defaultdict(float)
    for span in spans:
        kind, stage = span.action.kind, span.action.stage_index
        inputs[stage] += span.duration_seconds * (kind in _BACKWARDS)
        weights[stage] += span.duration_seconds * (kind is ActionKind.BACKWARD_WEIGHT)
    return {
        stage: 1.0 + weights[stage] / inputs[stage] if inputs[stage] else 1.0 for stage in inputs
    }


def _resident_bytes(layer: nn.Module, states: Mapping[Tensor, Any]) -> int:
    parameters = list(layer.parameters())
    kept = tensors_in([states[p] for p in parameters if p in states])
    tensors = (*parameters, *layer.buffers(), *kept)
    return version_bytes(parameters) + _bytes_of(tensors)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor.detach()).nbytes for tensor in tensors)


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0
