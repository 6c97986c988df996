"""A profile in tables and one line of conclusions."""

from __future__ import annotations

from dataclasses import fields

from lightning_dist.engine.common.table import Table, format_bytes, format_count
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.profiling.account import Use
from lightning_dist.engine.profiling.report import ProfileReport


def summary_table(report: ProfileReport) -> Table:
    """Returns the table of the numbers for the whole run."""
    first, last = report.first_batch, report.first_batch + report.num_steps - 1
    per_second = report.tokens_per_second
    tokens = "" if per_second is None else f", {per_second:,.0f} tokens per second"
    rows = [
        ("batches", f"{first} to {last}, {report.num_steps} timed"),
        ("step", f"{report.step_seconds * 1e3:.2f} ms"),
        ("throughput", f"{report.samples_per_second:,.1f} samples per second{tokens}"),
    ]
    if report.bubble_fraction is not None:
        predicted = report.predicted_bubble_fraction
        beside = "" if predicted is None else f", {predicted:.1%} predicted from these costs"
        rows.append(("bubble", f"{report.bubble_fraction:.1%} measured{beside}"))
    rows.append(("operations", _operations(report)))
    for kind, num_bytes in report.bytes_by_kind.items():
        rows.append((f"{kind.value}, all ranks", f"{format_bytes(num_bytes)} per step"))
    if report.exposed_share is not None:
        rows.append(("collectives", f"{report.exposed_share:.0%} of their time is exposed"))
    slowest = f"none; rank {report.slowest.rank} on {report.slowest.host} computes longest"
    rows.append(("stragglers", "; ".join(map(str, report.stragglers)) or slowest))
    if report.input_wait.is_input_bound:
        rows.append(("input", str(report.input_wait)))
    if len(report.records) > 1:
        offset = max(abs(offset.seconds) for offset in report.offsets)
        error = max(offset.uncertainty_seconds for offset in report.offsets)
        text = f"up to {offset * 1e3:.3f} ms apart, known to {error * 1e3:.3f} ms"
        rows.append(("clocks", text))
    return Table("Step profile", ("", ""), tuple(rows))


def time_table(report: ProfileReport) -> Table:
    """Returns the table of each rank's uses of time, in milliseconds per step."""
    uses = [use for use in Use if any(a.seconds[use] > 0 for a in report.accounts)]
    rows = [
        (
            str(record.place.rank),
            record.place.host,
            *(f"{account.seconds[use] * 1e3:.2f}" for use in uses),
            f"{account.step_seconds * 1e3:.2f}",
        )
        for record, account in zip(report.records, report.accounts, strict=True)
    ]
    headings = ("rank", "host", *(use.value for use in uses), "step")
    right = frozenset({0, *range(2, len(headings))})
    return Table(f"Milliseconds per step, {report.batches()}", headings, tuple(rows), right)


def memory_table(report: ProfileReport) -> Table:
    """Returns the table of each rank's memory, measured and predicted."""
    known = [m for r in report.records for m in (r.memory.measured, r.memory.predicted) if m]
    kinds = [f.name for f in fields(RankMemory) if any(getattr(memory, f.name) for memory in known)]
    rows = []
    for record in report.records:
        for name, memory in (
            ("measured", record.memory.measured),
            ("predicted", record.memory.predicted),
        ):
            if memory is not None:
                cells = [format_bytes(getattr(memory, kind)) for kind in kinds]
                rows.append((str(record.place.rank), name, *cells, format_bytes(memory.peak)))
        if record.memory.allocated_bytes is not None:
            blank = [""] * len(kinds)
            total = format_bytes(record.memory.allocated_bytes)
            rows.append((str(record.place.rank), "allocator", *blank, total))
    headings = ("rank", "", *(kind.replace("_", " ") for kind in kinds), "together")
    right = frozenset({0, *range(2, len(headings))})
    return Table(report.memory_title, headings, tuple(rows), right)


def _operations(report: ProfileReport) -> str:
    per_second = format_count(round(report.flops / report.step_seconds))
    text = f"{format_count(report.flops)} FLOPs per step, {per_second} per second"
    return text if report.mfu is None else f"{text}, MFU {report.mfu:.1%}"
