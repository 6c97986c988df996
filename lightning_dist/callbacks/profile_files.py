"""What becomes of a profile on rank 0: tables on the console, files, and pictures in loggers."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from lightning.pytorch.loggers import Logger

from lightning_dist.callbacks.console import print_tables
from lightning_dist.callbacks.media import Media
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.engine.profiling.summary import memory_table, summary_table, time_table
from lightning_dist.plotting import plot_profile, write_page
from lightning_dist.plotting.chrome_trace import write_chrome_trace

_NAME = "step_profile"


def publish(report: ProfileReport, directory: Path, loggers: Iterable[Logger]) -> None:
    """Prints, writes and shows a profile.

    Args:
        report: Of all ranks.
        directory: Where files go.
        loggers: Of the Trainer.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tables = {
        "summary": summary_table(report),
        "time": time_table(report),
        "memory": memory_table(report),
    }
    media, step = Media(loggers), report.first_batch + report.num_steps
    for name, table in tables.items():
        media.show_table(f"profile/{name}", table, step)
    media.show_timeline("profile/spans", report.timeline)
    written = [directory / f"{_NAME}.json"]
    phases = (phase for record in report.records for phase in record.phases)
    write_chrome_trace(report.timeline, written[0], phases)
    if find_spec("matplotlib") is not None:
        written.append(directory / f"{_NAME}.png")
        media.show_figure("profile/timeline", plot_profile(report, written[-1]), step)
    if find_spec("plotly") is not None:
        written.append(directory / f"{_NAME}.html")
        write_page(report, written[-1])
        media.show_page("profile/page", written[-1])
    print_tables(tables.values(), f"Profile: {', '.join(map(str, written))}", *_missing())


def _missing() -> list[str]:
    missing = [name for name in ("matplotlib", "plotly") if find_spec(name) is None]
    if not missing:
        return []
    return [
        f"Without {' and '.join(missing)} some pictures are missing: pip install"
        " 'lightning-dist[plots]'."
    ]
