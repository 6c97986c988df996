"""Run the lessons; ``python -m tests.helpers.notebooks`` writes them anew with their outputs."""

from __future__ import annotations

import os
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

# A package that torchmetrics imports would like widgets for its progress bars.
NAMED_WARNINGS = "ignore:IProgress not found"
FOLDER = Path("notebooks")
SOURCES = sorted(FOLDER.glob("*.py"))


def read_source(source: Path) -> NotebookNode:
    """Makes a notebook without outputs, the same one each time."""
    notebook = jupytext.read(source)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    return notebook


def execute(notebook: NotebookNode, folder: Path, cell_timeout_s: int = 120) -> None:
    """Fills in the outputs with a fresh kernel that runs in a folder."""
    NotebookClient(
        notebook,
        timeout=cell_timeout_s,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    ).execute(env={**os.environ, "PYTHONWARNINGS": NAMED_WARNINGS})


def main() -> None:
    for source in SOURCES:
        notebook = read_source(source)
        execute(notebook, FOLDER)
        nbformat.write(notebook, source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
