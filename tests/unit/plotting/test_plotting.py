from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_dist.engine.pipeline.measurements import Measurements
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import Action
from lightning_dist.engine.schedules.registry import PipelineShape, build_schedule
from lightning_dist.engine.schedules.simulator import StageCosts, simulate
from lightning_dist.engine.schedules.timeline import Span, SpanKind, Timeline
from lightning_dist.plotting import plot_timeline, plot_timelines
from lightning_dist.plotting.chrome_trace import read_chrome_trace, write_chrome_trace
from lightning_dist.plotting.style import new_figure
from lightning_dist.plotting.timelines import draw_legend, draw_timeline


def simulated(name: str = "1f1b") -> Timeline:
    schedule = build_schedule(name, num_stages=3, num_microbatches=4)
    return simulate(schedule, StageCosts.uniform(3))


def test_a_picture_has_a_row_per_rank_and_the_bubble(tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    figure = plot_timeline(simulated(), path, title="1f1b")
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]
    assert axes.get_title(loc="left") == "1f1b (bubble 33.3%)"
    assert "ms" in axes.get_xlabel()
    numbers = [text.get_text() for text in axes.texts]
    assert sorted(set(numbers)) == ["0", "1", "2", "3"]
    assert len(plot_timelines({"a": simulated("gpipe"), "b": simulated()}).axes) == 2


def test_a_picture_tells_stages_of_a_rank_and_parts_of_a_backward() -> None:
    schedule = build_schedule("zbv", num_stages=4, num_microbatches=4)
    figure = plot_timeline(simulate(schedule, StageCosts.uniform(4)))
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:4] == [
        "forward",
        "backward (or inputs' part)",
        "weights' part",
        "a rank's stage 2",
    ]
    underlined = figure.axes[0].collections[1]  # behind the boxes of rank 0
    assert len(underlined.get_paths()) == 3 * 4  # F, I and W of each micro-batch


@pytest.mark.parametrize("stages_per_rank", [2, 6, 7, 16])
def test_a_legend_fits_and_gives_a_colour_once(stages_per_rank: int) -> None:
    shape = PipelineShape(
        "interleaved_1f1b", 2, (1,) * 2 * stages_per_rank, 0, stages_per_rank=stages_per_rank
    )
    costs = StageCosts.uniform(2 * stages_per_rank, update_seconds=0.1)
    figure = new_figure(11.0, 4.0)
    timeline = simulate(shape.build(1), costs)
    draw_timeline(figure.subplots(), timeline, "", timeline.makespan_seconds * 1e3)
    draw_legend(figure, [timeline])
    figure.canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.width
    colours = [patch.get_facecolor() for patch in legend.get_patches()]
    assert len(set(colours)) == len(colours)
    of_stages = [text.get_text() for text in legend.get_texts() if "stage" in text.get_text()]
    named = [int(number) for text in of_stages for number in re.findall(r"\d+", text)]
    assert sorted(named) == list(range(2, stages_per_rank + 1))


def test_an_empty_timeline_can_be_drawn(tmp_path: Path) -> None:
    plot_timeline(Timeline(2, ()), tmp_path / "empty.png")


def test_grey_ends_where_a_timeline_ends() -> None:
    short = Timeline(1, (span(0, 0, 1), span(0, 2, 4)))
    figure = plot_timelines({"short": short, "long": Timeline(1, (span(0, 0, 10),))})
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())

    def colour_at(seconds: float) -> tuple[int, ...]:
        x, y = figure.axes[0].transData.transform((seconds * 1e3, 0.0))
        return tuple(pixels[len(pixels) - round(y), round(x)][:3])

    assert colour_at(1.5) == (0xE8, 0xE8, 0xE8)
    assert colour_at(6.0) == (255, 255, 255)
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert "update" not in legend


def test_a_trace_reads_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    timeline = simulated()
    write_chrome_trace(timeline, path)
    again = read_chrome_trace(path)
    assert again.num_ranks == 3
    assert again.bubble_fraction == pytest.approx(timeline.bubble_fraction)
    assert [s.action for s in again.spans] == [s.action for s in timeline.spans]
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}


def span(rank: int, start: float, end: float, kind: SpanKind = SpanKind.COMPUTE) -> Span:
    return Span(rank, kind, Action.parse("0F0"), start, end)


def test_timeline_arithmetic() -> None:
    timeline = Timeline(2, (span(0, 1, 3), span(1, 3, 5), span(1, 1, 2, SpanKind.WAIT)))
    assert (timeline.makespan_seconds, timeline.busy_seconds(), timeline.busy_seconds(1)) == (
        4,
        4,
        2,
    )
    assert timeline.bubble_fraction == 0.5
    assert timeline.shifted_to_zero().start_seconds == 0
    window = timeline.between(2, 4)
    assert [(s.start_seconds, s.end_seconds) for s in window.spans] == [(2, 3), (3, 4)]
    assert (Timeline(2, ()).bubble_fraction, Timeline(2, ()).makespan_seconds) == (0.0, 0.0)


def test_the_steady_part_is_the_longest_undisturbed_one() -> None:
    ranks = [
        {0: (span(0, 0, 1),), 2: (span(0, 10, 11), span(0, 11, 14))},
        {0: (span(1, 0, 1),), 2: (span(1, 11, 12), span(1, 12, 15))},
    ]
    steady = Measurements(ranks).steady_timeline
    assert steady.makespan_seconds == 3
    assert Measurements(ranks).timeline.makespan_seconds == 15
    assert Measurements().timeline.spans == ()


def test_the_recorder_forgets_what_is_old() -> None:
    recorder = Recorder(1, torch.device("cpu"), capacity=3)
    for index in range(5):
        if index == 4:
            recorder.interrupt()
        with recorder.span(SpanKind.COMPUTE, Action.parse(f"0F{index}")):
            pass
    stretches = recorder.stretches()
    assert {k: [str(s.action) for s in v] for k, v in stretches.items()} == {
        0: ["0F2", "0F3"],
        1: ["0F4"],
    }
    assert all(s.rank == 1 and s.duration_seconds >= 0 for v in stretches.values() for s in v)


def test_the_recorder_keeps_all_that_is_asked_for() -> None:
    recorder = Recorder(1, torch.device("cpu"), capacity=3)
    for index in range(8):
        if index == 1:
            recorder.keep()
        if index == 4:
            recorder.interrupt()
        with recorder.span(SpanKind.COMPUTE, Action.parse(f"0F{index}")):
            pass
    kept = [(stretch, str(span.action)) for stretch, span in recorder.take()]
    assert kept == [(0, "0F1"), (0, "0F2"), (0, "0F3"), *((1, f"0F{i}") for i in range(4, 8))]
    assert recorder.take() == ()
