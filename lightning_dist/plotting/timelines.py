"""Draw timelines: a row per rank, a box per action.

Measured and simulated timelines are of one type, so one function draws either, and several above
each other on one scale. If a rank has several stages, boxes of all but its first are underlined.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from lightning_dist.engine.schedules.actions import ActionKind
from lightning_dist.engine.schedules.timeline import Span, SpanKind, Timeline
from lightning_dist.plotting.style import (
    BLACK,
    BLUE,
    GREEN,
    LIME,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    VERMILION,
    VIOLET,
    YELLOW,
    clear_frame,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LAPS = (VERMILION, PURPLE, YELLOW, BLACK, LIME, VIOLET)
"""Colours of a rank's stages but its first; with more stages they come again."""
_LEGEND_ROW, _LEGEND_COLUMNS = 6, 5  # entries of a single row; columns of several rows
_UNDERLINE_HEIGHT = 0.14
_ROW_HEIGHT = 0.82
_WIDTH_INCHES = 12.0
_CHARACTERS_PER_INCH = 13.0


def plot_timeline(
    timeline: Timeline,
    path: str | os.PathLike[str] | None = None,
    *,
    title: str | None = None,
) -> Figure:
    """Draws one timeline.

    Args:
        timeline: Measured or simulated.
        path: File of the picture, whose ending chooses the format. None writes nothing.
        title: Title above the picture.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    return plot_timelines({title or "Timeline": timeline}, path)


def plot_timelines(
    timelines: Mapping[str, Timeline], path: str | os.PathLike[str] | None = None
) -> Figure:
    """Draws timelines above each other, on one scale of time.

    Args:
        timelines: The timelines by title.
        path: File of the picture, whose ending chooses the format. None writes nothing.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    rows = [timeline.num_ranks for timeline in timelines.values()]
    height = sum(0.5 * count + 0.55 for count in rows) + 0.75
    figure = new_figure(_WIDTH_INCHES, height)
    axes = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    span_ms = max(timeline.makespan_seconds for timeline in timelines.values()) * 1e3
    for panel, (title, timeline) in zip(axes, timelines.items(), strict=True):
        named = f"{title} (bubble {timeline.bubble_fraction:.1%})"
        draw_timeline(panel, timeline, named, span_ms)
    axes[-1].set_xlabel("time (ms)")
    draw_legend(figure, timelines.values())
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def draw_timeline(axes: Axes, timeline: Timeline, title: str, span_ms: float) -> None:
    """Draws a timeline into a panel, from zero, on a scale of so many milliseconds."""
    timeline = timeline.shifted_to_zero()
    for rank in range(timeline.num_ranks):
        spans = [s for s in timeline.spans if s.rank == rank and _colour(s) is not None]
        axes.broken_barh(
            [(s.start_seconds * 1e3, s.duration_seconds * 1e3) for s in spans],
            (rank - _ROW_HEIGHT / 2, _ROW_HEIGHT),
            facecolors=[_colour(s) or PALE for s in spans],
            edgecolor="white",
            linewidth=0.5,
        )
        _underline(axes, rank, [s for s in spans if s.kind is SpanKind.COMPUTE])
        for span in spans:
            _label(axes, span, span_ms)
    axes.axvspan(0, timeline.makespan_seconds * 1e3, color=PALE, linewidth=0, zorder=0)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_yticks(range(timeline.num_ranks), [f"rank {r}" for r in range(timeline.num_ranks)])
    axes.set_ylim(timeline.num_ranks - 0.5, -0.5)
    axes.set_xlim(0, max(span_ms, 1e-9))
    axes.tick_params(axis="y", length=0)
    clear_frame(axes, "top", "right", "left")


def _underline(axes: Axes, rank: int, spans: list[Span]) -> None:
    """Underlines the boxes that are not of the rank's first stage."""
    stages = sorted({span.action.stage_index for span in spans})
    for lap, stage in enumerate(stages[1:]):
        axes.broken_barh(
            [
                (s.start_seconds * 1e3, s.duration_seconds * 1e3)
                for s in spans
                if s.action.stage_index == stage
            ],
            (rank + _ROW_HEIGHT / 2 - _UNDERLINE_HEIGHT, _UNDERLINE_HEIGHT),
            facecolors=_LAPS[lap % len(_LAPS)],
            edgecolor="white",
            linewidth=0.5,
        )


def _label(axes: Axes, span: Span, span_ms: float) -> None:
    if span.kind is not SpanKind.COMPUTE or span_ms <= 0:
        return
    text = str(span.action.microbatch_index)
    room = span.duration_seconds * 1e3 / span_ms * _WIDTH_INCHES * 0.92 * _CHARACTERS_PER_INCH
    if len(text) + 0.6 > room:
        return
    axes.text(
        (span.start_seconds + span.duration_seconds / 2) * 1e3,
        span.rank,
        text,
        ha="center",
        va="center",
        fontsize=8,
        color="black" if span.action.kind is ActionKind.FORWARD else "white",
        clip_on=True,
    )


def _colour(span: Span) -> str | None:
    if span.kind is SpanKind.UPDATE:
        return ORANGE
    if span.kind is not SpanKind.COMPUTE:
        return None
    parts = {ActionKind.FORWARD: SKY, ActionKind.BACKWARD_WEIGHT: GREEN}
    return parts.get(span.action.kind, BLUE)


def draw_legend(
    figure: Figure,
    timelines: Collection[Timeline],
    idle: str = "waiting (numbers: micro-batches)",
) -> None:
    """Draws a legend of the drawn timelines; ``idle`` is the grey entry's text."""
    from matplotlib.patches import Patch

    spans = [span for timeline in timelines for span in timeline.spans]
    kinds = {span.action.kind for span in spans}
    most = max(_most_stages(timeline.spans) for timeline in timelines)
    stages = [list(range(2, most + 1))[lap :: len(_LAPS)] for lap in range(len(_LAPS))]
    parted = ActionKind.BACKWARD_WEIGHT in kinds
    entries = {
        "forward": SKY,
        "backward (or inputs' part)" if parted else "backward": BLUE,
        **({"weights' part": GREEN} if parted else {}),
        **({"update": ORANGE} if any(s.kind is SpanKind.UPDATE for s in spans) else {}),
        **{_stages_text(own): c for own, c in zip(stages, _LAPS, strict=True) if own},
        idle: PALE,
    }
    handles = [Patch(facecolor=c, edgecolor="#999999", label=n) for n, c in entries.items()]
    figure.legend(
        handles=handles,
        loc="outside upper right",
        ncols=len(handles) if len(handles) <= _LEGEND_ROW else _LEGEND_COLUMNS,
        frameon=False,
        fontsize=9,
    )


def _stages_text(stages: Sequence[int]) -> str:
    return f"a rank's stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _most_stages(spans: Iterable[Span]) -> int:
    stages: dict[int, set[int]] = {}
    for span in spans:
        stages.setdefault(span.rank, set()).add(span.action.stage_index)
    return max(map(len, stages.values()), default=1)
