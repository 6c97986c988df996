"""The work of Lightning's loop around the steps, as the loop reports it to its profiler.

Lightning reports to ``trainer.profiler`` when it fetches a batch, saves a checkpoint, calls a hook.
So a profiler in its place needs no user hook, and passes all reports on to the user's profiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import MappingProxyType
from typing import Any

from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_dist.engine.profiling.account import Use
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.profiling.meters.torch_trace import part_of_step
from lightning_dist.engine.profiling.record import Phase, PhaseKind
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind

_FORWARD = (SpanKind.COMPUTE, ActionKind.FORWARD)
_BACKWARD = (SpanKind.COMPUTE, ActionKind.BACKWARD)
_UPDATE = (SpanKind.UPDATE, ActionKind.STEP)
_Event = PhaseKind | tuple[SpanKind, ActionKind]
_PARTS: Mapping[_Event, str] = MappingProxyType(
    {_FORWARD: Use.FORWARD, _BACKWARD: Use.BACKWARD, _UPDATE: Use.UPDATE}
)


class LoopProfiler(Profiler):
    """Records the loop's actions while it listens, and passes them on to the user's profiler.

    Parts of a step never overlap. With manual optimization the backward and the update are inside
    of ``training_step``; the forward is what is left of it, before, between and after them.

    Attributes:
        listens: Whether anything is recorded.
        annotates: Whether parts of the step get their names in a trace of torch's profiler.
        batch: The number of the batch that spans are of.
    """

    def __init__(self, users: Profiler, recorder: Recorder, *, records_steps: bool) -> None:
        super().__init__()
        self.users = users
        self.summary = users.summary  # type: ignore[method-assign]
        self.describe = users.describe  # type: ignore[method-assign]
        self.setup = users.setup  # type: ignore[method-assign]
        self.listens = False
        self.annotates = False
        self.batch = 0
        self._recorder = recorder
        self._records_steps = records_steps
        self._begun: dict[_Event, Any] = {}
        self._interrupts_forward: _Event | None = None
        self._phases: list[tuple[PhaseKind, Any, Any]] = []
        self._named: dict[_Event, ExitStack] = {}

    @override
    def start(self, action_name: str) -> None:
        self.users.start(action_name)
        if self.listens or self.annotates:
            event = self._event(action_name)
            if event is not None and event != _UPDATE:
                self.begin(event)

    @override
    def stop(self, action_name: str) -> None:
        if self.listens or self.annotates:
            event = self._event(action_name)
            if event is not None:
                self.end(event)
        self.users.stop(action_name)

    def begin_backward(self) -> None:
        """Notes the begin of a manual backward, of which Lightning does not tell its profiler."""
        if self._records_steps:
            self.begin(_BACKWARD)

    def end_backward(self) -> None:
        """Notes the end of a manual backward."""
        self.end(_BACKWARD)

    def begin_update(self) -> None:
        """Notes that the gradients are complete: Lightning's own action holds the whole step."""
        if self._records_steps:
            self.begin(_UPDATE)

    def begin(self, event: _Event) -> None:
        """Begins a phase, or a part of a step."""
        is_in_forward = _FORWARD in self._begun or _FORWARD in self._named
        if event in (_BACKWARD, _UPDATE) and is_in_forward:
            self.end(_FORWARD)
            self._interrupts_forward = event
        if self.annotates and event in _PARTS:
            self._named[event] = ExitStack()
            self._named[event].enter_context(part_of_step(_PARTS[event]))
        if self.listens:
            self._begun[event] = self._recorder.mark()

    def end(self, event: _Event) -> None:
        """Ends what has begun, and records it."""
        self._named.pop(event, ExitStack()).close()
        if (start := self._begun.pop(event, None)) is not None:
            if isinstance(event, PhaseKind):
                self._phases.append((event, start, self._recorder.mark()))
            else:
                kind, action = event
                self._recorder.record(kind, Action(0, action, self.batch), start)
        if self._interrupts_forward == event:
            self._interrupts_forward = None
            self.begin(_FORWARD)

    def take(self) -> tuple[Phase, ...]:
        """Returns the phases since the last call."""
        phases, self._phases = self._phases, []
        rank, seconds = self._recorder.rank, self._recorder.seconds
        return tuple(Phase(rank, kind, seconds(a), seconds(b)) for kind, a, b in phases)

    def _event(self, name: str) -> _Event | None:
        if name.endswith("train_dataloader_next") or name.endswith(".batch_to_device"):
            return PhaseKind.DATA_LOADING
        if name == "save_checkpoint":
            return PhaseKind.CHECKPOINT
        if not self._records_steps:
            return None
        if name.startswith("[Strategy]") and name.endswith(".training_step"):
            return _FORWARD
        if name.startswith("[Strategy]") and name.endswith(".backward"):
            return _BACKWARD
        is_update = name == "optimizer_step" or name.endswith(".optimizer_step")
        return _UPDATE if is_update else None
