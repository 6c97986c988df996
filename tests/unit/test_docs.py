"""The pages draw schedules as they are, and call what exists with arguments that exist."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import lightning_dist
from lightning_dist import callbacks, wrap
from lightning_dist.engine.parallelize import ShardConfig
from lightning_dist.engine.planning import partition_layers
from lightning_dist.engine.schedules import StageCosts, build_schedule
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.strategies.base.distributed import RunArguments

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
DRAWN = re.compile(
    r'```python\nbuild_schedule\("(?P<name>\w+)", (?P<sizes>.*)\)\.format_grid\(\)\n```\n\n'
    r"```text\n(?P<grid>(.+\n)+)```",
)
CALLABLES = {
    **{
        name: getattr(module, name)
        for module in (lightning_dist, callbacks, wrap)
        for name in module.__all__
    },
    **{it.__name__: it for it in (PipelineConfig, ShardConfig, TensorConfig, StageCosts)},
    **{it.__name__: it for it in (build_schedule, partition_layers)},
}
STRATEGIES = {it for name, it in CALLABLES.items() if name.endswith("Strategy")}


def test_the_page_of_schedules_draws_each_as_the_code_does() -> None:
    shown, drawn = {}, {}
    for match in DRAWN.finditer((ROOT / "docs" / "schedules.md").read_text(encoding="utf-8")):
        name = match["name"]
        sizes = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match["sizes"])}
        shown[name] = match["grid"].rstrip("\n")
        drawn[name] = build_schedule(name, **sizes).format_grid()
    assert shown == drawn
    assert set(shown) == set(SCHEDULE_NAMES)


def test_the_index_names_each_page_in_its_table_and_the_site_in_a_toctree() -> None:
    folder = ROOT / "docs"
    index = (folder / "index.md").read_text(encoding="utf-8")
    pages = {path.stem for path in folder.glob("*.md")} - {"index"}
    listed = set(re.findall(r"^\| \[\w+\.md\]\((\w+)\.md\)", index, re.MULTILINE))
    assert pages - listed == set()
    trees = "".join(
        tree
        for path in folder.glob("*.md")
        for tree in re.findall(r"^```{toctree}\n(.*?)^```", path.read_text("utf-8"), re.M | re.S)
    )
    assert pages - set(trees.split()) == set()


def snippets(page: str) -> Iterator[str]:
    """Yields the Python of a page: blocks, new lines of a diff, and what stands in a line.

    Of a table's row it is the last cell: the first one of a migration page names other packages.
    """
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            yield block
        if language == "diff":
            yield "\n".join(line[2:] for line in block.splitlines() if not line.startswith("-"))
    for line in re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL).splitlines():
        yield from re.findall(r"`([^`]+)`", line.strip("| ").rpartition("|")[2])


def calls(snippet: str) -> Iterator[ast.Call]:
    try:
        tree = ast.parse(snippet)
    except SyntaxError:  # a path, an argument, a shell's line
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in CALLABLES
        ):
            yield node


def arguments_of(target: Callable[..., object]) -> set[str]:
    """Returns the names of a callable's arguments, with those that all strategies have."""
    known = set(inspect.signature(target).parameters)
    return known | RunArguments.__annotations__.keys() if target in STRATEGIES else known


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_calls_in_a_page_have_arguments_that_exist(path: Path) -> None:
    for snippet in snippets(path.read_text(encoding="utf-8")):
        for call in calls(snippet):
            target = CALLABLES[call.func.id]
            positional = [ast.unparse(argument) for argument in call.args]
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            inspect.signature(target).bind_partial(*positional, **keywords)  # a TypeError names it
            assert keywords.keys() <= arguments_of(target)
            try:
                values = [ast.literal_eval(argument) for argument in call.args]
                named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            except ValueError:  # not literals
                continue
            if ... not in [*values, *named.values()]:
                target(*values, **named)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs").glob("migration_*.md")), ids=lambda p: p.stem
)
def test_new_arguments_in_a_migration_page_exist(path: Path) -> None:
    known = {name for it in CALLABLES.values() for name in arguments_of(it)}
    rows = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [row.strip("| ").rpartition(" | ")[2] for row in rows]
    named = {name for cell in cells for name in re.findall(r"`(\w+)=[^`]*`", cell)}
    assert named
    assert named <= known
