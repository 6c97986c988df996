"""The lessons run from top to bottom, and what is stored of them is whole."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.helpers.lesson_runs import LessonRuns
from tests.helpers.notebooks import FOLDER, SOURCES, read_source

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
run_by_default = pytest.mark.some("01_*", "02_*", "03_*", "04_*")  # others take the time of tests

# What cells with these calls print depends on the code alone.
COUNTED = ("format_grid(", "in_flight(", "dry_run(")


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def counted(notebook: NotebookNode) -> list[str]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [cell for cell in cells if any(call in cell.source for call in COUNTED)]
    return [o.text for cell in shown for o in cell.outputs if o.output_type == "stream"]


def test_each_notebook_has_a_source() -> None:
    assert NOTEBOOKS
    assert [path.stem for path in NOTEBOOKS] == [path.stem for path in SOURCES]


@pytest.mark.timeout(240)
@run_by_default
@each_notebook
def test_a_notebook_runs_and_counts_as_stored(path: Path, lessons: LessonRuns) -> None:
    notebook = lessons.outcome(path)
    assert not [o for o in outputs(notebook) if o.output_type == "error"]
    assert counted(notebook) == counted(nbformat.read(path, as_version=4)), "make notebooks"


@each_notebook
def test_a_notebook_is_in_step_with_its_source(path: Path) -> None:
    def content(notebook: NotebookNode) -> list[tuple[str, str]]:
        return [(cell.cell_type, cell.source) for cell in notebook.cells]

    stored = nbformat.read(path, as_version=4)
    assert content(stored) == content(read_source(path.with_suffix(".py"))), "make notebooks"


@each_notebook
def test_a_notebook_holds_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    stored = outputs(notebook)
    assert any("image/png" in o.get("data", {}) for o in stored)
    assert not [o for o in stored if o.output_type == "error" or o.get("name") == "stderr"]
    texts = [o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in stored]
    assert not [t for t in texts if any(f"/{root}/" in t for root in ("home", "root", "tmp"))]
