"""An empty figure that needs no display, and no global state of pyplot, and the colours."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from lightning_dist.engine.profiling.account import Use

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Creates a figure; raises ``ImportError`` if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Drawing needs matplotlib: pip install 'lightning-dist[plots]'"
        ) from error
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def clear_frame(axes: Axes, *sides: str) -> None:
    """Hides sides of a frame."""
    for side in sides:
        axes.spines[side].set_visible(False)


SKY, BLUE, ORANGE, GREEN = "#56B4E9", "#0072B2", "#E69F00", "#009E73"
VERMILION, PURPLE, YELLOW, PALE, GREY = "#D55E00", "#CC79A7", "#F0E442", "#E8E8E8", "#999999"
BLACK, LIME, VIOLET = "#000000", "#A4D65E", "#7A1FA2"

OF_USES = MappingProxyType(
    {
        Use.FORWARD: SKY,
        Use.BACKWARD: BLUE,
        Use.UPDATE: ORANGE,
        Use.WAITING: PALE,
        Use.COMMUNICATION: VERMILION,
        Use.DATA_LOADING: YELLOW,
        Use.CHECKPOINT: PURPLE,
        Use.OTHER: GREY,
    }
)

OF_MEMORY = MappingProxyType(
    {
        "parameters": BLUE,
        "gradients": SKY,
        "optimizer_state": ORANGE,
        "activations": GREEN,
        "unsharded": YELLOW,
        "buffers": PURPLE,
        "stash": VERMILION,
        "temporary": GREY,
    }
)
