"""Draw the costs of layers, the present cut into stages, and the better cut."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from lightning_dist.engine.planning.balance import Balance
from lightning_dist.plotting.style import (
    BLUE,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    clear_frame,
    new_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMES = 24
"""Number of layers' names; more cannot be read side by side."""
_MOST_CHARACTERS = 90
"""Number of characters of names side by side; with more, names are slanted."""
_LONGEST_NAME = 18
_LAYERS_INCHES = 3.36
_STAGES_INCHES = (2.24, 8.0)  # the least and the most
_AROUND_INCHES, _STAGE_INCHES = 0.75, 0.17  # legend and numbers; a name
_MOST_STAGES = int((_STAGES_INCHES[1] - _AROUND_INCHES) / _STAGE_INCHES)
_MOST_WIDE_LINES = 12


def plot_balance(balance: Balance, path: str | os.PathLike[str] | None = None) -> Figure:
    """Draws a balance: layers with both cuts above, the stages of both below.

    If no cut is faster than today's, only today's cut is drawn.

    Args:
        balance: The measured balance.
        path: File of the picture, whose ending chooses the format. None writes nothing.

    Returns:
        The matplotlib figure.

    Raises:
        ImportError: matplotlib is not installed.
    """
    least, most = _STAGES_INCHES
    inches = min(max(least, _AROUND_INCHES + _STAGE_INCHES * len(balance.cut)), most)
    figure = new_figure(9.0, _LAYERS_INCHES + inches)
    layers, stages = figure.subplots(2, 1, height_ratios=(_LAYERS_INCHES, inches))
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
    # Dashes over a solid line, so that both show where the cuts agree in part.
    lines = [(balance.cut, GREY, "-", 3.5, "cut today")]
    if balance.cut != balance.better_cut:
        lines.append((balance.better_cut, VERMILION, "--", 1.8, "better cut"))
    narrower = min(1.0, _MOST_WIDE_LINES / len(balance.cut))
    for cut, colour, style, width, name in lines:
        for index, place in enumerate(list(accumulate(cut))[:-1]):
            label = name if index == 0 else None
            axes.axvline(place - 0.5, color=colour, ls=style, lw=width * narrower, label=label)
    step = -(-len(costs) // _MOST_NAMES)
    pattern, names = shorten_names([layer.name for layer in costs])
    axes.set_xticks(places[::step], names[::step])
    if max(map(len, names)) * len(names[::step]) > _MOST_CHARACTERS:
        axes.tick_params(axis="x", labelrotation=40, labelsize=8)
        for tick in axes.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")  # else it ends beside its bar
    axes.set_xlabel("layer" if pattern == "*" else f"layer, * of {pattern}")
    axes.set_ylabel("ms per micro-batch")
    axes.set_ylim(0, max(map(sum, zip(forward, backward, strict=True))) * 1.08)
    axes.set_title(_title(balance), loc="left", fontsize=11, pad=24)  # above the legend
    axes.legend(frameon=False, fontsize=9, ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    clear_frame(axes, "top", "right")


def shorten_names(names: Sequence[str]) -> tuple[str, list[str]]:
    """Removes the dotted parts that all names share, and the middle of names that are still long.

    Returns:
        The shared parts with ``*`` in the place of the rest, and the rest of each name.
    """
    parts = [name.split(".") for name in names]
    most = min(map(len, parts)) - 1 if len(names) > 1 else 0  # each keeps one part
    first = _count_shared(parts, most)
    last = _count_shared([name[::-1] for name in parts], most - first)
    pattern = ".".join([*parts[0][:first], "*", *parts[0][len(parts[0]) - last :]])
    return pattern, [_abridge(".".join(name[first : len(name) - last])) for name in parts]


def _count_shared(parts: Sequence[Sequence[str]], most: int) -> int:
    """Counts how many of the first ``most`` parts are the same in all names."""
    return next((i for i in range(most) if len({name[i] for name in parts}) > 1), most)


def _abridge(name: str) -> str:
    half = _LONGEST_NAME // 2
    return name if len(name) <= _LONGEST_NAME else f"{name[: half - 1]}…{name[-half:]}"


def _title(balance: Balance) -> str:
    if balance.cut == balance.better_cut:
        return f"Layers{balance.measured_in}: no cut is faster"
    return f"Layers{balance.measured_in}: the better cut saves {balance.gain:.0%} of a step"


def _draw_stages(axes: Axes, balance: Balance) -> None:
    bars = [(balance.cut, GREY, "today", balance.step_seconds)]
    if balance.cut != balance.better_cut:
        bars.append((balance.better_cut, ORANGE, "better", balance.better_step_seconds))
    height, places = 0.8 / len(bars), range(len(balance.cut))
    for number, (cut, colour, name, step) in enumerate(bars):
        label = f"{name}: a step of {step * 1e3:.1f} ms (predicted)"
        times = [seconds * 1e3 for seconds in balance.stage_seconds(cut)]
        shift = height * (number - (len(bars) - 1) / 2)
        beside = [place + shift for place in places]
        axes.barh(beside, times, height=0.95 * height, color=colour, label=label)
    named = places[:: -(-len(places) // _MOST_STAGES)]
    axes.set_yticks(named, [f"stage {place}" for place in named])
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlabel("ms per micro-batch")
    axes.legend(frameon=False, fontsize=9, ncols=2, loc="lower left", bbox_to_anchor=(0, 1))
    clear_frame(axes, "top", "right")
