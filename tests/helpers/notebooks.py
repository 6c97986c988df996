"""Run the lessons; ``python -m tests.helpers.notebooks [NAME ...]`` stores their outputs."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

# A package that torchmetrics imports would like widgets for its progress bars.
NAMED_WARNINGS = "ignore:IProgress not found"
# A kernel is no rank of whoever starts it.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Linux runs a process of this policy where nobody else wants to, and so it does what that starts.
STEP_BACK = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
CELL_SECONDS = 120
FOLDER = Path("notebooks")
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))  # others are scripts that a lesson has written


def read_source(source: Path) -> NotebookNode:
    """Makes a notebook without outputs, the same one each time."""
    notebook = jupytext.read(source)
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    return notebook


def own_environment() -> dict[str, str]:
    """Returns this process's variables without those of a launcher; its `python` is found first."""
    found = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {
        **found,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }


def execute(
    notebook: NotebookNode,
    folder: Path,
    environment: Mapping[str, str],
    steps_back: bool = False,
) -> None:
    """Fills in the outputs with a fresh kernel that runs in a folder.

    Args:
        notebook: What to run.
        folder: Where.
        environment: The kernel's.
        steps_back: Whether the kernel takes only what time other processes leave, and so has more.
    """
    seconds = 10 * CELL_SECONDS if steps_back else CELL_SECONDS
    steps_back = steps_back and hasattr(os, "SCHED_IDLE")
    variables = {**environment, "PYTHONWARNINGS": NAMED_WARNINGS}
    with TemporaryDirectory() as sockets:
        # Not ports: one that is free when a kernel is begun may be taken when it asks for it.
        kernel = {"transport": "ipc", "connection_file": f"{sockets}/kernel.json"}
        client = NotebookClient(
            notebook,
            timeout=seconds,
            startup_timeout=seconds,
            iopub_timeout=seconds,
            extra_arguments=[f"--IPKernelApp.exec_lines={STEP_BACK}"] if steps_back else [],
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"KernelManager": kernel}),
        )
        asyncio.run(client.async_execute(env=variables))  # its own loop would be left unclosed


def main() -> None:
    for source in [source for source in SOURCES if not sys.argv[1:] or source.stem in sys.argv[1:]]:
        notebook = read_source(source)
        with TemporaryDirectory() as folder:
            execute(notebook, Path(folder), own_environment())
        nbformat.write(notebook, source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
