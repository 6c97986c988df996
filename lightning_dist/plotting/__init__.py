"""Pictures of timelines, balances and profiles; of matplotlib, and one page of plotly.

Colours are Okabe and Ito's, which the colour-blind can tell apart. Colours side by side differ in
lightness too.
"""

from lightning_dist.plotting.balance import plot_balance
from lightning_dist.plotting.page import write_page
from lightning_dist.plotting.profile import plot_profile
from lightning_dist.plotting.timelines import plot_timeline, plot_timelines

__all__ = ["plot_balance", "plot_profile", "plot_timeline", "plot_timelines", "write_page"]
