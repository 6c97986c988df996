"""The table of the documentation: ``python -m tests.integration.first_hour.table`` writes it."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.processes.workers import WorkerPool
from tests.integration.first_hour.common import (
    STRATEGIES,
    TOLERANCE,
    compare,
    has_batch_norm,
    train,
)
from tests.integration.first_hour.modules import MODULES

PAGE = Path(__file__).parents[3] / "docs" / "first_hour.md"
HEADER = "| module | "
REPLICATED = ("DDPStrategy()", "FSDPStrategy()", "MeshStrategy()")

CHANGES = {
    "Pass layers=": "`layers=`",
    "Pass plan=": "`plan=`",
}
"""How the errors begin that end a run at once, and what the table calls the change."""


def outcome(workers: WorkerPool, module: str, strategy: str) -> str:
    """Runs a module and returns what its cell of the table says."""
    replicates = has_batch_norm(module) and strategy in REPLICATED
    options = {"sync_batchnorm": True} if replicates else {}
    ranks = workers.run(STRATEGIES[strategy][2], train, module, strategy, options)
    errors = {rank.error for rank in ranks}
    assert len(errors) == 1, errors
    (error,) = errors
    if error:
        kind, _, text = error.partition(": ")
        assert kind == "ValueError", error
        assert not any(rank.batches for rank in ranks), error
        (change,) = (change for begin, change in CHANGES.items() if text.startswith(begin))
        return f"says {change}"
    difference = compare(module, ranks)
    assert difference < TOLERANCE, difference
    return "equal with `sync_batchnorm=True`" if replicates else "equal"


def read_table() -> dict[tuple[str, str], str]:
    """Reads the cells, by module and strategy."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(HEADER))
    strategies = [cell.strip("` ") for cell in lines[start].split("|")[2:-1]]
    rows = [line.split("|")[1:-1] for line in lines[start + 2 :] if line.startswith("|")]
    return {
        (row[0].strip(), strategy): cell.strip()
        for row in rows
        for strategy, cell in zip(strategies, row[1:], strict=True)
    }


def main() -> None:
    """Runs all cells and writes them into the page."""
    workers = WorkerPool()
    rows = [HEADER + " | ".join(f"`{name}`" for name in STRATEGIES) + " |"]
    rows.append("|---" * (1 + len(STRATEGIES)) + "|")
    for module in MODULES:
        cells = [outcome(workers, module, strategy) for strategy in STRATEGIES]
        rows.append(f"| {module} | {' | '.join(cells)} |")
    workers.close()
    text = PAGE.read_text()
    before, _, rest = text.partition(HEADER)
    behind = rest[rest.index("|\n\n") + 1 :]
    PAGE.write_text(before + "\n".join(rows) + behind)


if __name__ == "__main__":
    main()
