"""A compiler that compiles nothing, and counts."""

from __future__ import annotations

from typing import Any


class Graphs:
    """Stands for a compiler.

    Attributes:
        num_made: Graphs that were handed over.
        num_runs: Runs of these.
        breaks: Reasons of graph breaks, which the test collects.
    """

    def __init__(self) -> None:
        self.num_made = self.num_runs = 0
        self.breaks: list[str] = []

    def __call__(self, graph: Any, _: Any) -> Any:
        self.num_made += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph(*args)

        return run
