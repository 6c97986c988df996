"""Draw which layers cost what, where the stages are cut, and where they should be."""

from __future__ import annotations

import os
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_dist.pipeline.balance import Balance
from lightning_dist.plotting.canvas import clear_frame, new_figure
from lightning_dist.plotting.colours import BLUE, GREY, ORANGE, SKY, VERMILION

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMES = 24
"""Of layers; more cannot be read side by side."""


def plot_balance(balance: Balance, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws a balance: layers with both cuts above, the stages of both below.

    Args:
        balance: What was measured.
        path: Where to write the picture; its ending chooses the format. None writes nothing.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(9.0, 5.6)
    layers, stages = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_layers(layers, balance)
    _draw_stages(stages, balance)
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure


def _draw_layers(axes: Axes, balance: Balance) -> None:
    costs = balance.costs.layers
    places = range(len(costs))
    forward = [layer.forward_seconds * 1e3 for layer in costs]
    backward = [layer.backward_seconds * 1e3 for layer in costs]
    axes.bar(places, forward, color=SKY, label="forward")
    axes.bar(places, backward, bottom=forward, color=BLUE, label="backward")
    # Dashes over a solid line, so that both show where the cuts agree.
    for cut, colour, style, width, name in (
        (balance.cut, GREY, "-", 3.5, "cut today"),
        (balance.better_cut, VERMILION, "--", 1.8, "better cut"),
    ):
        for index, place in enumerate(list(accumulate(cut))[:-1]):
            label = name if index == 0 else None
            axes.axvline(place - 0.5, color=colour, ls=style, lw=width, label=label)
    step = -(-len(costs) // _MOST_NAMES)
    axes.set_xticks(places[::step], [layer.name for layer in costs][::step])
    longest = max(len(layer.name) for layer in costs)
    if longest * len(costs[::step]) > 90:
        axes.tick_params(axis="x", labelrotation=60, labelsize=8)
    axes.set_xlabel("layer")
    axes.set_ylabel("ms per micro-batch")
    axes.set_ylim(0, max(map(sum, zip(forward, backward, strict=True))) * 1.08)
    axes.set_title(_title(balance), loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    clear_frame(axes, "top", "right")


def _title(balance: Balance) -> str:
    if balance.cut == balance.better_cut:
        return "Layers: no cut is faster"
    return f"Layers: the better cut saves {balance.gain:.0%} of a step"


def _draw_stages(axes: Axes, balance: Balance) -> None:
    today, better = (
        [seconds * 1e3 for seconds in balance.stage_seconds(cut)]
        for cut in (balance.cut, balance.better_cut)
    )
    places = range(len(today))
    for shift, times, colour, name, step in (
        (-0.2, today, GREY, "today", balance.step_seconds),
        (0.2, better, ORANGE, "better", balance.better_step_seconds),
    ):
        label = f"{name}: a step of {step * 1e3:.1f} ms (predicted)"
        axes.barh([p + shift for p in places], times, height=0.38, color=colour, label=label)
    axes.set_yticks(places, [f"stage {place}" for place in places])
    axes.invert_yaxis()
    axes.set_xlabel("ms per micro-batch")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    clear_frame(axes, "top", "right")
