"""One HTML page about a profile, with everything in it: it opens without network or server.

plotly's script is 4.8 MB. The page holds it compressed, which browsers can unpack since 2023.
"""

from __future__ import annotations

import gzip
import html
import os
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_dist.engine.common.table import Table, scale_of_bytes
from lightning_dist.engine.profiling.account import Use, use_of
from lightning_dist.engine.profiling.record import Phase
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.profiling.summary import memory_table, summary_table, time_table
from lightning_dist.engine.schedules.timeline import Span
from lightning_dist.plotting.profile import Bars
from lightning_dist.plotting.style import BLUE, GREEN, OF_USES, SKY

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_STYLE = """
body {font-family: system-ui, sans-serif; max-width: 1100px; margin: 2em auto; color: #222}
table {border-collapse: collapse; font-size: 14px; margin-bottom: 1em}
th, td {padding: 3px 12px; border-bottom: 1px solid #ddd; text-align: left}
.right {text-align: right; font-variant-numeric: tabular-nums}
"""
_DRAW = """
const packed = atob(document.getElementById("plotly").textContent);
const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
new Response(stream).text().then((source) => {
  const script = document.createElement("script");
  script.textContent = source;
  document.head.append(script);
  for (const place of document.querySelectorAll(".figure")) {
    const figure = JSON.parse(place.textContent);
    place.replaceChildren();
    Plotly.newPlot(place, figure.data, figure.layout, {responsive: true, displaylogo: false});
  }
});
"""


def write_page(report: ProfileReport, path: str | os.PathLike[str]) -> None:
    """Writes the tables, the timeline, the memory and the layers of a profile.

    Args:
        report: Report of all ranks.
        path: The HTML file; about 2 MB, most of which is plotly.

    Raises:
        ImportError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("The page needs plotly: pip install 'lightning-dist[plots]'") from error
    figures = [
        _timeline(report),
        _stacked(f"Where the time of a step goes, {report.batches()}", Bars.of_uses(report)),
        _stacked(report.memory_title, Bars.of_memory(report)),
    ]
    if report.layers:
        figures.append(_layers(report))
    tables = [summary_table(report), time_table(report), memory_table(report)]
    plotly = b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    parts = [
        "<!DOCTYPE html><html lang='en'><head><meta charset='utf-8'><title>Step profile</title>",
        f"<style>{_STYLE}</style></head><body>",
        *map(_html_of, tables),
        *map(_place_of, figures),
        f"<script type='text/plain' id='plotly'>{plotly}</script><script>{_DRAW}</script>",
        "</body></html>",
    ]
    Path(path).write_text("\n".join(parts), encoding="utf-8")


def _html_of(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        classes = [" class='right'" if i in table.right else "" for i in range(len(cells))]
        inside = (
            f"<{tag}{name}>{html.escape(cell)}</{tag}>"
            for name, cell in zip(classes, cells, strict=True)
        )
        return f"<tr>{''.join(inside)}</tr>"

    head = row(table.headings, "th") if any(table.headings) else ""
    body = "".join(row(cells, "td") for cells in table.rows)
    return f"<h2>{html.escape(table.title)}</h2><table>{head}{body}</table>"


def _place_of(figure: Figure) -> str:
    description = str(figure.to_json()).replace("<", "\\u003c")  # no tag ends the script early
    height = figure.layout.height
    return (
        f"<div class='figure' style='height: {height}px'>"
        f"<script type='application/json'>{description}</script></div>"
    )


# --- figures -------------------------------------------------------------------------------------


def _timeline(report: ProfileReport) -> Figure:
    parts: list[tuple[Span | Phase, str]] = [(s, str(s.action)) for s in report.timeline.spans]
    parts += [(phase, phase.kind.value) for record in report.records for phase in record.phases]
    shown = [(use, part, text) for part, text in parts if (use := use_of(part)) is not None]
    zero = min((part.start_seconds for _, part, _ in shown), default=0.0)
    bars: dict[Use, list[tuple[int, float, float, str]]] = {}
    for use, part, text in shown:
        start, duration = (part.start_seconds - zero) * 1e3, part.duration_seconds * 1e3
        bars.setdefault(use, []).append((part.rank, start, duration, text))
    figure = _figure("What happened when", "time (ms)", len(report.records), barmode="overlay")
    for use in Use:
        if use in bars:
            figure.add_trace(_boxes(use, bars[use]))
    ranks = [f"rank {record.place.rank}" for record in report.records]
    figure.update_yaxes(categoryorder="array", categoryarray=ranks)
    return figure


def _boxes(use: Use, entries: Sequence[tuple[int, float, float, str]]) -> Any:
    from plotly.graph_objects import Bar

    ranks, starts, durations, texts = zip(*entries, strict=True)
    return Bar(
        name=use.value,
        orientation="h",
        y=[f"rank {rank}" for rank in ranks],
        base=[round(start, 4) for start in starts],
        x=[round(duration, 4) for duration in durations],
        text=texts,
        textposition="none",
        marker={"color": OF_USES[use], "line": {"color": "white", "width": 0.3}},
        hovertemplate="%{text}: %{x:.3f} ms from %{base:.3f} ms",
    )


def _layers(report: ProfileReport) -> Figure:
    from plotly.graph_objects import Bar

    figure = _figure("Layers", "layer", 8, barmode="stack")
    names = [f"{index}: {layer.name}" for index, layer in enumerate(report.layers)]
    forward = [layer.forward_seconds * 1e3 for layer in report.layers]
    backward = [layer.backward_seconds * 1e3 for layer in report.layers]
    scale, unit = scale_of_bytes(max(layer.activation_bytes for layer in report.layers))
    kept = [layer.activation_bytes / scale for layer in report.layers]
    figure.add_trace(Bar(name="forward", x=names, y=forward, marker={"color": SKY}))
    figure.add_trace(Bar(name="backward", x=names, y=backward, marker={"color": BLUE}))
    figure.add_trace(
        {
            "type": "scatter",
            "mode": "markers",
            "name": f"keeps for its backward ({unit})",
            "x": names,
            "y": kept,
            "yaxis": "y2",
            "marker": {"color": GREEN, "size": 9, "symbol": "diamond"},
        }
    )
    figure.update_layout(
        yaxis={"title": {"text": "ms per micro-batch"}, "rangemode": "tozero"},
        yaxis2={
            "title": {"text": f"{unit} per micro-batch"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "tickmode": "auto",  # round numbers; by default they stand where the others do
        },
    )
    return figure


def _stacked(title: str, bars: Bars) -> Figure:
    from plotly.graph_objects import Bar

    figure = _figure(title, bars.unit, len(bars.rows), barmode="stack")
    for kind, colour in bars.colours.items():
        values = [row[kind] for row in bars.rows.values()]
        if any(values):
            marker = {"color": colour}
            names = [*bars.rows]
            figure.add_trace(Bar(name=kind, orientation="h", y=names, x=values, marker=marker))
    return figure


def _figure(title: str, unit: str, num_rows: int, *, barmode: str) -> Figure:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        title={"text": title, "x": 0, "font": {"size": 18}},
        font={"family": "system-ui, sans-serif", "color": "#222"},
        barmode=barmode,
        height=170 + 34 * num_rows,
        template="plotly_white",
        xaxis={"title": {"text": unit}},
        margin={"l": 120, "r": 40, "t": 60, "b": 50},
        legend={
            "orientation": "h",
            "traceorder": "normal",  # that of the bars, which plotly turns round where they stack
            "x": 1,
            "xanchor": "right",
            "y": 1.02,
            "yanchor": "bottom",
        },
    )
    if unit != "layer":
        figure.update_yaxes(autorange="reversed", ticksuffix="  ")
    return figure
