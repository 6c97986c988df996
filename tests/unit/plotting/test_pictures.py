from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_dist.engine.common.table import scale_of_bytes
from lightning_dist.engine.planning.balance import find_balance
from lightning_dist.engine.planning.layer_costs import LayerCosts, StepCosts
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.plotting import plot_balance, plot_profile, write_page
from lightning_dist.plotting.balance import shorten_names
from lightning_dist.plotting.chrome_trace import read_chrome_trace, write_chrome_trace
from tests.unit.engine.profiling.reports import STEP_SECONDS, report_of


def test_a_profile_has_a_panel_for_each_question(tmp_path: Path) -> None:
    path = tmp_path / "profile.png"
    report = replace(report_of(), first_batch=4)
    last = 3 + report.num_steps
    figure = plot_profile(report, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size < 200_000
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    bubble = f"(bubble {report.bubble_fraction:.1%})"  # what lies between steps is none
    measured = bubble.replace("(bubble", f"(bubble of batches 4 to {last}:")
    assert titles[0] == f"Measured, batches 4 to 5 {measured}"
    assert titles[2] == f"Time by use, batches 4 to {last}"
    assert titles[1] == f"Predicted from the costs of batches 4 to {last} {bubble}"
    assert [axes.get_xlabel() for axes in figure.axes] == ["time (ms)"] * 2 + ["ms per step", "MB"]
    widths = sum(bar.get_width() for bar in figure.axes[2].patches)
    assert widths == pytest.approx(2 * STEP_SECONDS * 1e3)


def test_without_a_pipeline_there_is_no_bubble() -> None:
    records = tuple(replace(r, place=replace(r.place, shape=None)) for r in report_of().records)
    figure = plot_profile(ProfileReport(records, ()))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    last = len(records[0].steps) - 1
    use = f"Time by use, batches 0 to {last}"
    memory = f"Memory at its peak, up to batch {last}"
    assert titles == ["Measured, batches 0 to 1", use, memory]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-1] == "in between (numbers: batches)"


def test_grey_of_a_pipeline_is_not_called_waiting() -> None:
    legend = [text.get_text() for text in plot_profile(report_of()).legends[0].get_texts()]
    assert legend[-1] == "in between (numbers: micro-batches)"


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "profile.html"
    write_page(report_of("zb_h1"), path)
    page = path.read_text(encoding="utf-8")
    own = page.split("id='plotly'", 1)[0]
    assert not re.search(r"<(script|link|img)[^>]*(src|href)=", page)
    assert own.count("<div class='figure'") == 4
    for text in ("What happened when", "ms per step", "Memory at its peak", "0: layer 0", "host1"):
        assert text in own
    assert path.stat().st_size < 2_200_000


def test_a_trace_tells_the_loop_from_the_steps(tmp_path: Path) -> None:
    report, path = report_of(), tmp_path / "trace.json"
    phases = [phase for record in report.records for phase in record.phases]
    write_chrome_trace(report.timeline, path, phases)
    events = json.loads(path.read_text())["traceEvents"]
    loop = [event for event in events if event.get("tid") == "loop"]
    assert [event["name"] for event in loop] == ["data loading"] * 6
    # Loading begins before the first span; Perfetto drops what is before zero.
    assert loop[0]["ts"] == pytest.approx(0.0)
    assert min(event["ts"] for event in events if event["ph"] == "X") >= 0.0
    assert next(event["ts"] for event in events if event["name"] == "0F0") == pytest.approx(7000.0)
    assert len(read_chrome_trace(path).spans) == len(report.timeline.spans)


COSTS = StepCosts(
    tuple(LayerCosts(f"{i}", size, 2 * size) for i, size in enumerate((0.004, 0.001, 0.001, 0.002)))
)


@pytest.mark.parametrize(("cut", "title"), [((3, 1), "saves 2"), ((1, 3), "no cut is faster")])
def test_a_balance_shows_both_cuts_where_one_is_better(
    tmp_path: Path, cut: tuple[int, int], title: str
) -> None:
    balance = find_balance(COSTS, PipelineShape("1f1b", 8, cut, rank=0))
    figure = plot_balance(balance, tmp_path / "balance.png")
    layers, stages = figure.axes
    assert title in layers.get_title(loc="left")
    measured = replace(balance, batches=(2, 6))
    shown = plot_balance(measured).axes[0].get_title(loc="left")
    assert shown.startswith("Layers, batches 2 to 6: ")
    assert measured.layer_table.title == "Layers, per micro-batch, batches 2 to 6"
    assert (layers.get_xlabel(), layers.get_ylabel()) == ("layer", "ms per micro-batch")
    heights = sum(bar.get_height() for bar in layers.patches)
    assert heights == pytest.approx(24.0)
    lines = {line.get_label(): line.get_xdata()[0] for line in layers.lines}
    better = {} if cut == (1, 3) else {"better cut": 0.5}
    assert lines == {"cut today": cut[0] - 0.5} | better
    assert len(stages.patches) == 2 * len(lines)
    assert [bar.get_width() for bar in stages.patches][-2:] == pytest.approx([12.0, 12.0])


@pytest.mark.parametrize(
    ("names", "pattern", "short"),
    [
        (["a.h.0.block", "a.h.1.block"], "a.h.*.block", ["0", "1"]),
        (["embed", "h.0", "h.1"], "*", ["embed", "h.0", "h.1"]),
        (["h", "h"], "*", ["h", "h"]),
        (["a.b"], "*", ["a.b"]),
        (["a.x", "a.x.y"], "a.*", ["x", "x.y"]),
        (["m.encoder_of_many_words", "m.b"], "m.*", ["encoder_…any_words", "b"]),
    ],
)
def test_names_are_short(names: list[str], pattern: str, short: list[str]) -> None:
    assert shorten_names(names) == (pattern, short)


@pytest.mark.parametrize("name", ["model.transformer.h.{}.block", "{}.attention_and_feed_forward"])
def test_names_of_layers_leave_room_for_bars(name: str) -> None:
    layers = tuple(LayerCosts(name.format(index), 0.001, 0.002) for index in range(20))
    figure = plot_balance(find_balance(StepCosts(layers), PipelineShape("1f1b", 8, (10, 10), 0)))
    figure.draw_without_rendering()
    panel = figure.axes[0]
    assert panel.get_window_extent().height > 0.35 * figure.bbox.height
    boxes = [label.get_window_extent() for label in panel.get_xticklabels()]
    slanted = panel.get_xticklabels()[0].get_rotation() > 0
    assert slanted or all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False))


@pytest.mark.parametrize("num_stages", [1, 8, 13, 30, 64, 128])
def test_names_of_stages_do_not_overlap(num_stages: int) -> None:
    costs = StepCosts((LayerCosts("layer", 0.001, 0.002),) * num_stages)
    shape = PipelineShape("gpipe", 2, (1,) * num_stages, 0)
    figure = plot_balance(find_balance(costs, shape))
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[1].get_yticklabels()]
    assert all(above.y0 >= below.y1 for above, below in zip(boxes, boxes[1:], strict=False))
    assert len(boxes) >= num_stages / 4
    assert figure.axes[0].get_window_extent().height > 150


@pytest.mark.parametrize(
    ("num_bytes", "scale"),
    [(0, (1.0, "B")), (999, (1.0, "B")), (2e6, (1e6, "MB")), (1e18, (1e12, "TB"))],
)
def test_units_of_axes(num_bytes: float, scale: tuple[float, str]) -> None:
    assert scale_of_bytes(num_bytes) == scale
