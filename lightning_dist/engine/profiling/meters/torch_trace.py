"""Traces by torch's profiler: a file of some steps, and the times of collectives in one step.

The profiler sees collectives and compute in any code, so this works for any strategy. On a CPU a
rank computes while an operation of ATen runs, on a GPU while a kernel runs that is no collective.
Kineto's records are read directly: ``events()`` of the profiler takes longer than the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile as autograd_profile
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_dist.engine.profiling.exposure import Exposure, Interval

_BACKENDS = ("gloo:", "nccl:", "mpi:", "ucc:")  # before a collective's name, on the host
_NCCL = "nccl"  # as in ncclDevKernel_AllReduce_Sum_f32_RING_LL(...), on a GPU
_ATEN = "aten::"
_PART = "lightning_dist::"


class CollectiveTrace:
    """Traces from :meth:`start` to :meth:`stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._profile: autograd_profile | None = None

    def start(self, barrier: Callable[[], None]) -> None:
        """Begins the trace, then waits at a barrier: some ranks take longer to begin it."""
        on_device = self._device.type == "cuda"
        self._profile = autograd_profile(use_kineto=True, use_device="cuda" if on_device else None)
        self._profile.__enter__()
        barrier()

    def stop(self) -> Exposure | None:
        """Ends the trace and returns the exposure; None if no trace has begun."""
        if self._profile is None:
            return None
        self._profile.__exit__(None, None, None)
        found = self._profile.kineto_results
        self._profile = None
        assert found is not None
        return exposure_of(found.events(), on_device=self._device.type == "cuda")


def part_of_step(name: str) -> record_function:
    """Returns a context manager that names a part of the step in the trace."""
    return record_function(f"{_PART}{name}")


def exposure_of(events: Iterable[Any], *, on_device: bool) -> Exposure:
    """Creates the exposure from the events of a trace: of ``autograd_profile.kineto_results``.

    With ``on_device`` kernels count, and not operations of the host.
    """
    collectives: list[Interval] = []
    computing: dict[int, list[Interval]] = {}
    parts: dict[str, list[Interval]] = {}
    of_collectives: set[int] = set()
    for event in events:
        if on_device and event.device_type() != DeviceType.CUDA:
            continue
        name = event.name()
        if name.startswith(_ATEN):  # most events on a CPU
            computing.setdefault(event.start_thread_id(), []).append(_interval(event))
        elif name.startswith(_PART):
            parts.setdefault(name.removeprefix(_PART), []).append(_interval(event))
        elif name.startswith(_NCCL if on_device else _BACKENDS):
            collectives.append(_interval(event))
            of_collectives.add(event.start_thread_id())
        elif on_device and not event.is_user_annotation():
            computing.setdefault(event.start_thread_id(), []).append(_interval(event))
    # On a CPU the backend's threads add and copy, which is the collective's own work.
    hidden_by = (t for t in computing if on_device or t not in of_collectives)
    return Exposure.of(collectives, [i for thread in hidden_by for i in computing[thread]], parts)


def _interval(event: Any) -> Interval:
    return event.start_ns() / 1e9, event.end_ns() / 1e9


def trace_for_perfetto(device: torch.device) -> profile:
    """Returns a profiler of this process and its device, for ``export_chrome_trace``."""
    on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    # There is one cycle, but torch before 2.13 still warns that other cycles' events get lost.
    return profile(activities=[ProfilerActivity.CPU, *on_device], acc_events=True)
