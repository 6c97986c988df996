"""Draw a profile: the timelines, the use of time, and the use of memory.

The bars of a profile are the same for a picture and for a page.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from lightning_dist.engine.common.table import scale_of_bytes
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.profiling.account import Use
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.schedules.timeline import Timeline
from lightning_dist.plotting.style import OF_MEMORY, OF_USES, clear_frame, new_figure
from lightning_dist.plotting.timelines import draw_legend, draw_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES = 11.0
_DRAWN_STEPS = 2


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars: values by bar and kind, in a unit, and the kinds' colours in order."""

    rows: Mapping[str, Mapping[str, float]]
    colours: Mapping[str, str]
    unit: str

    @classmethod
    def of_uses(cls, report: ProfileReport) -> Bars:
        """Creates the bars of each rank's time in a step, by use."""
        rows = {
            f"rank {record.place.rank}": {use.value: s * 1e3 for use, s in account.seconds.items()}
            for record, account in zip(report.records, report.accounts, strict=True)
        }
        return cls(rows, {use.value: OF_USES[use] for use in Use}, "ms per step")

    @classmethod
    def of_memory(cls, report: ProfileReport) -> Bars:
        """Creates the bars of each rank's memory, measured and predicted."""
        rows: dict[str, dict[str, float]] = {}
        for record in report.records:
            rank = f"rank {record.place.rank}"
            rows[rank] = _bytes_by_kind(record.memory.measured)
            if record.memory.predicted is not None:
                rows[f"{rank}, predicted"] = _bytes_by_kind(record.memory.predicted)
        scale, unit = scale_of_bytes(max(sum(row.values()) for row in rows.values()))
        scaled = {name: {kind: b / scale for kind, b in row.items()} for name, row in rows.items()}
        return cls(scaled, {_named(kind): colour for kind, colour in OF_MEMORY.items()}, unit)


def _bytes_by_kind(memory: RankMemory) -> dict[str, float]:
    return {_named(field.name): getattr(memory, field.name) for field in fields(memory)}


def _named(kind: str) -> str:
    return kind.replace("_", " ")


def plot_profile(report: ProfileReport, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws two measured steps, the predicted timeline, and each rank's time and memory.

    Args:
        report: Report of all ranks.
        path: File of the picture, whose ending chooses the format. None writes nothing.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    timelines = drawn_timelines(report)
    rows = [0.5 * timeline.num_ranks + 0.7 for timeline in timelines.values()]
    bars = 0.42 * len(report.records) + 1.0
    heights = [*rows, bars, bars * 1.3]
    figure = new_figure(_WIDTH_INCHES, sum(heights) + 0.8)
    panels = figure.subplots(len(heights), 1, height_ratios=heights)
    span_ms = max(timeline.makespan_seconds for timeline in timelines.values()) * 1e3
    for panel, (title, timeline) in zip(panels, timelines.items(), strict=False):
        draw_timeline(panel, timeline, title, span_ms)
        panel.set_xlabel("time (ms)")
    is_pipeline = report.predicted_timeline is not None
    # Grey is data loading and validation too; the page and the trace have boxes for these.
    numbers = "micro-batches" if is_pipeline else "batches"
    draw_legend(figure, timelines.values(), f"in between (numbers: {numbers})")
    _stack(panels[-2], f"Time by use, {report.batches()}", Bars.of_uses(report))
    _stack(panels[-1], report.memory_title, Bars.of_memory(report))
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure


def drawn_timelines(report: ProfileReport) -> dict[str, Timeline]:
    """Returns the timelines to draw: some steps, and the prediction of the same length at most."""
    count = min(_DRAWN_STEPS, report.num_steps)
    start = min(record.steps[0][0] for record in report.records)
    end = max(record.steps[count - 1][1] for record in report.records)
    shown = report.timeline.between(start, end)
    title, whole = f"Measured, {report.batches(count)}", report.batches()
    predicted = report.predicted_timeline
    if predicted is None:
        return {title: shown}
    # The report's bubbles: the time between steps is in the picture, and in neither number.
    clipped = predicted.between(0.0, max(shown.makespan_seconds, 1e-9))
    prediction = f"Predicted from the costs of {whole}"
    return {
        f"{title} (bubble of {whole}: {report.bubble_fraction:.1%})": shown,
        f"{prediction} (bubble {report.predicted_bubble_fraction:.1%})": clipped,
    }


def _stack(axes: Axes, title: str, bars: Bars) -> None:
    names = list(bars.rows)
    left = [0.0] * len(names)
    for kind, colour in bars.colours.items():
        widths = [row[kind] for row in bars.rows.values()]
        if any(width > 0 for width in widths):
            axes.barh(names, widths, left=left, color=colour, label=kind, height=0.7)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(bars.unit)
    axes.legend(
        frameon=False,
        fontsize=8.5,
        ncols=8,
        handlelength=1.0,
        handletextpad=0.5,
        columnspacing=1.0,
        loc="lower right",
        bbox_to_anchor=(1.01, 0.98),
    )
    axes.tick_params(axis="y", length=0)
    clear_frame(axes, "top", "right", "left")
