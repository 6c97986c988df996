"""Say how what ranks saw of a run differs from what one device sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.differential.case import ROUGH_PRECISIONS, Case
from tests.differential.dials.strategies import STRATEGIES, Entry
from tests.differential.observe import Observation

# Hooks of the update, which a stage of an asynchronous pipeline makes some batches later.
UPDATE_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
# A checkpoint's own notes, what depends on the clock, and what replicas alone have.
UNCOMPARED = ("lightning_dist", "Timer", "outer_momentum", "replica_optimizer_states")


def tolerance_of(case: Case) -> float:
    """Gives the largest difference that rounding explains."""
    own = STRATEGIES[case.strategy].tolerance
    if case.precision in ROUGH_PRECISIONS:
        return max(own, 5e-2)
    return max(own, 2e-4 if case.precision == "32-true" else 1e-9)


def differences(
    case: Case,
    ranks: Sequence[Observation],
    files: Mapping[str, Any],
    reference: Observation,
    reference_files: Mapping[str, Any],
) -> list[str]:
    """Lists what differs, a line each; none if the strategy is as one device.

    Args:
        case: What was run.
        ranks: What each rank saw.
        files: What is on disk.
        reference: What one device sees.
        reference_files: What it writes.
    """
    entry = STRATEGIES[case.strategy]
    found = list(_refusals(ranks, reference))
    tolerance = tolerance_of(case)
    if found or reference.refusal is not None:
        found += _compare("files", _plain(files), _plain(reference_files), tolerance)
        return found
    for rank, seen in enumerate(ranks):
        where = f"rank {rank}: "
        if rank > 0 and "own_names" in case.callbacks:  # this rank's names of files are its own
            continue
        found += _compare_series(where + "logged", seen, reference, entry, tolerance)
        found += _compare(where + "metrics", seen.metrics, reference.metrics, tolerance)
        found += _compare_progress(where + "progress", seen, reference, entry, tolerance)
        found += _compare_events(where + "hooks", seen, reference, entry)
        if entry.replicas == 1:
            found += _compare(
                where + "predictions", seen.predictions, reference.predictions, tolerance
            )
    if entry.replicas == 1 or case.returns != "weight":  # else a mean of replicas that weigh
        found += _compare_outputs(ranks, reference, entry, tolerance)
    found += _compare("files", _plain(files), _plain(reference_files), tolerance)
    return found


def _refusals(ranks: Sequence[Observation], reference: Observation) -> Iterator[str]:
    messages = sorted({str(seen.refusal) for seen in (*ranks, reference)})
    if len(messages) > 1:
        yield f"refused: {messages}"


# --- logged values --------------------------------------------------------------------------------


def _series(seen: Observation) -> dict[str, list[tuple[int | None, float]]]:
    series: dict[str, list[tuple[int | None, float]]] = {}
    for step, row in seen.rows:
        for name, value in row.items():
            if name != "epoch":
                series.setdefault(name, []).append((step, value))
    return series


def _compare_series(
    where: str, seen: Observation, reference: Observation, entry: Entry, tolerance: float
) -> Iterator[str]:
    actual, expected = _series(seen), _series(reference)
    if entry.versions is None:
        yield from _compare(where, actual, expected, tolerance)
        return
    # Values of an asynchronous pipeline's batches are known some batches later.
    for name in sorted(actual.keys() | expected.keys()):
        here, there = actual.get(name, []), expected.get(name, [])
        values = [value for _, value in here], [value for _, value in there]
        yield from _compare(f"{where} {name}", *values, tolerance)
        lags = [a - b for (a, _), (b, _) in zip(here, there, strict=False) if None not in (a, b)]  # type: ignore[operator]
        if any(not 0 <= lag < entry.stages for lag in lags):
            yield f"{where} {name}: logged {lags} steps later"


# --- progress -------------------------------------------------------------------------------------


def _compare_progress(
    where: str, seen: Observation, reference: Observation, entry: Entry, tolerance: float
) -> Iterator[str]:
    actual, expected = dict(seen.progress), dict(reference.progress)
    if entry.versions is not None and "lr_find" in actual:
        # A finder takes the loss that is known for that of the batch at hand.
        late, found = dict(actual["lr_find"]), dict(expected["lr_find"])
        losses = late.pop("losses")
        if not all(map(math.isfinite, losses)) or len(losses) != len(found.pop("losses")):
            yield f"{where} lr_find: losses {losses}"
        del late["suggestion"], found["suggestion"]
        actual["lr_find"], expected["lr_find"] = late, found
    yield from _compare(where, actual, expected, tolerance)


# --- outputs of steps -----------------------------------------------------------------------------


def _compare_outputs(
    ranks: Sequence[Observation], reference: Observation, entry: Entry, tolerance: float
) -> Iterator[str]:
    if entry.versions is not None:
        yield from _compare_late_outputs(ranks, reference, tolerance)
        return
    if entry.replicas == 1:
        for rank, seen in enumerate(ranks):
            yield from _compare(f"rank {rank}: outputs", seen.outputs, reference.outputs, tolerance)
        return
    if len({len(seen.outputs) for seen in ranks}) > 1:
        yield f"outputs: ranks saw {[len(seen.outputs) for seen in ranks]} batches"
        return
    means = [sum(values) / len(ranks) for values in zip(*(s.outputs for s in ranks), strict=True)]
    yield from _compare("outputs, mean of ranks", means, reference.outputs, tolerance)


def _compare_late_outputs(
    ranks: Sequence[Observation], reference: Observation, tolerance: float
) -> Iterator[str]:
    """Checks that each output is the loss of this or an earlier batch, in order."""
    for rank, seen in enumerate(ranks):
        if len(seen.outputs) != len(reference.outputs):
            yield f"rank {rank}: outputs of {len(seen.outputs)} of {len(reference.outputs)} batches"
            continue
        first = 0
        for batch, value in enumerate(seen.outputs):
            known = reference.outputs[first : batch + 1]
            near = [i for i, loss in enumerate(known) if abs(loss - value) < tolerance]
            if not near:
                yield f"rank {rank}: output {batch} is {value}, and no batch's of {known}"
                break
            first += near[0]


# --- hooks ----------------------------------------------------------------------------------------


def _compare_events(
    where: str, seen: Observation, reference: Observation, entry: Entry
) -> Iterator[str]:
    actual, expected = seen.events, reference.events
    if where.startswith("rank") and not where.startswith("rank 0"):
        expected = [name for name in expected if name != "module.prepare_data"]
    if entry.versions is not None:
        actual, expected = map(_without_updates, (actual, expected))
    for index, (name, other) in enumerate(zip(actual, expected, strict=False)):
        if name != other:
            yield f"{where}: call {index} is {name}, not {other}, behind {actual[:index][-3:]}"
            return
    if len(actual) != len(expected):
        more = actual[len(expected) :] or expected[len(actual) :]
        yield f"{where}: {len(actual)} calls, not {len(expected)}, from {more[0]} on"


def _without_updates(events: list[str]) -> list[str]:
    return [event for event in events if event.split(".")[1] not in UPDATE_HOOKS]


# --- trees ----------------------------------------------------------------------------------------


def _plain(files: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _without_notes(content) for name, content in files.items()}


def _without_notes(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {
            _name_of(key): _without_notes(value)
            for key, value in tree.items()
            if not any(str(key).startswith(name) for name in UNCOMPARED)
        }
    if isinstance(tree, list | tuple):
        return [_without_notes(value) for value in tree]
    if isinstance(tree, Tensor):
        return tree.cpu()
    return Path(tree).name if isinstance(tree, str) and "/" in tree else tree


def _name_of(key: Any) -> Any:
    """Takes the folder out of what is named by a file."""
    return Path(key).name if isinstance(key, str) and key.startswith("/") else key


def _compare(where: str, actual: Any, expected: Any, tolerance: float) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key in sorted(actual.keys() | expected.keys(), key=str):
            if key not in actual:
                yield f"{where} {key}: missing"
            elif key not in expected:
                yield f"{where} {key}: not on one device"
            else:
                yield from _compare(f"{where} {key}", actual[key], expected[key], tolerance)
    elif isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
        if len(actual) != len(expected):
            yield f"{where}: {len(actual)} entries {actual}, not {len(expected)} {expected}"
            return
        for index, (value, other) in enumerate(zip(actual, expected, strict=True)):
            yield from _compare(f"{where} {index}", value, other, tolerance)
    elif isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if actual.shape != expected.shape or actual.dtype != expected.dtype:
            yield (
                f"{where}: {actual.dtype} {tuple(actual.shape)}, not {expected.dtype}"
                f" {tuple(expected.shape)}"
            )
        elif not torch.allclose(
            actual.double(), expected.double(), rtol=0.0, atol=tolerance, equal_nan=True
        ):
            most = float((actual.double() - expected.double()).abs().max())
            yield f"{where}: differs by {most:.3e}"
    elif isinstance(expected, float) and isinstance(actual, float):
        if not _near(actual, expected, tolerance):
            yield f"{where}: {actual!r}, not {expected!r}"
    elif type(actual) is not type(expected) or actual != expected:
        yield f"{where}: {actual!r}, not {expected!r}"


def _near(actual: float, expected: float, tolerance: float) -> bool:
    if math.isnan(expected):
        return math.isnan(actual)
    return actual == expected or abs(actual - expected) <= tolerance * max(1.0, abs(expected))
