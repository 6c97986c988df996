"""Draw the measured timelines of several runs above each other.

.. code-block:: bash

    python -m recipes.compare OUT.png gpipe=runs/gpt_gpipe/version_0/trace.json ...
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_dist.plotting import plot_timelines
from lightning_dist.plotting.chrome_trace import read_chrome_trace
from recipes.run_summary import newest_part


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: Words of the command line; None takes those of the process.
    """
    parser = argparse.ArgumentParser(prog="python -m recipes.compare", description=__doc__)
    parser.add_argument("picture", metavar="OUT.png")
    parser.add_argument("traces", metavar="TITLE=TRACE.json", nargs="+")
    options = parser.parse_args(arguments)
    for trace in options.traces:
        if "=" not in trace:
            parser.error(f"{trace} has no title. Write TITLE={trace}.")
    pairs = [trace.split("=", 1) for trace in options.traces]
    timelines = {title: newest_part(read_chrome_trace(path)) for title, path in pairs}
    shortest = min(timeline.makespan_seconds for timeline in timelines.values())
    shown = {
        title: timeline.between(timeline.end_seconds - shortest, timeline.end_seconds)
        for title, timeline in timelines.items()
    }
    plot_timelines(shown, options.picture)


if __name__ == "__main__":
    main()
