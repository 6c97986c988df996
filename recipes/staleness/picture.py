"""Draw the study: loss against tokens above, loss against simulated time below."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from recipes.staleness.summary import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart.
_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "sync, 1f1b": "#000000",
        "sync, zbv": "#999999",
        "pipedream": "#0072B2",
        "no stash": "#D55E00",
        "vertical sync": "#CC79A7",
        "lr": "#E69F00",
        "predict": "#56B4E9",
        "2bw": "#009E73",
        "2bw, predict": "#009E73",
        "sync, replicas": "#000000",
        "server": "#7F3FBF",
        "local sgd, 5": "#F0E442",
        "local sgd, 20": "#F0E442",
        "diloco, 5": "#8B4513",
        "diloco, 20": "#8B4513",
    }
)
# Beside the same colour without.
_DASHED = ("2bw, predict", "sync, replicas", "local sgd, 20", "diloco, 20")
_ALIKE = ("sync, zbv", "sync, replicas")  # as "sync, 1f1b", but for the time
_HIDDEN_AT_THE_START = 0.15


def draw(
    found: Sequence[Curve], stages: Sequence[int], batch_tokens: int, title: str, path: Path
) -> None:
    """Draws the curves of one optimizer.

    Args:
        found: Curves of the optimizer.
        stages: Numbers of stages, a column for each.
        batch_tokens: Number of tokens per update.
        title: Title above the picture.
        path: File of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.2 + 3.6 * len(stages), 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(stages), squeeze=False, sharey=True)
    for column, num_stages in enumerate(stages):
        own = [curve for curve in found if curve.num_stages == num_stages]
        of_tokens = [curve for curve in own if curve.clocked.name not in _ALIKE]
        tokens, time = panels[0][column], panels[1][column]
        _lines(tokens, of_tokens, lambda c: [u * batch_tokens / 1e3 for u in c.updates])
        _lines(time, own, lambda c: list(c.seconds))
        tokens.set_title(f"{num_stages} ranks", loc="left", fontsize=11)
        tokens.set_xlabel("thousand tokens")
        time.set_xlabel("simulated time (batches of one device)")
    for row in panels:
        row[0].set_ylabel("validation, bits per byte")
    _limit(panels[0][0], found)
    names = {line.get_label(): line for panel in panels[1] for line in panel.get_lines()}
    figure.legend(
        names.values(),
        names.keys(),
        loc="outside lower center",
        ncols=min(len(names), 3 * len(stages)),
        frameon=False,
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, found: Sequence[Curve], places: Callable[[Curve], list[float]]) -> None:
    for curve in found:
        x, name = places(curve), curve.clocked.name
        colour, style = _COLOURS[name], "--" if name in _DASHED else "-"
        axes.plot(x, curve.means, style, color=colour, linewidth=1.6, label=name)
        columns = list(zip(*curve.losses, strict=True))
        low, high = [min(c) for c in columns], [max(c) for c in columns]
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#E8E8E8", linewidth=0.8)


def _limit(axes: Axes, found: Sequence[Curve]) -> None:
    """Shows where the curves differ; all fall steeply before."""
    shown = [
        loss
        for curve in found
        for count, loss in zip(curve.updates, curve.means, strict=True)
        if count > _HIDDEN_AT_THE_START * curve.updates[-1] and math.isfinite(loss)
    ]
    if shown:
        axes.set_ylim(min(shown) - 0.05, max(shown) + 0.05)
