"""An empty figure that needs no display, and no global state of pyplot."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Makes a figure.

    Args:
        width_inches: Of the picture.
        height_inches: Of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
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
    """Takes away lines of a frame that say nothing.

    Args:
        axes: The panel.
        sides: Of the frame.
    """
    for side in sides:
        axes.spines[side].set_visible(False)
