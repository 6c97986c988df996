"""Real sentences with classes and without a download: the docstrings of the standard library.

Each text is the first paragraph of the docstring of a module, class or function; its class is the
area of the library that the module belongs to. Whole modules, which are files, are kept for
validation and test. So a model is tested on no file that it was trained on, though perhaps on
another file of the same package, and must know the meaning of words.

The texts differ a little between versions of Python.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Chapters of the Library Reference. All modules are in Python 3.11 to 3.14, and have sources.
AREAS = {
    "numbers and dates": (
        *("numbers", "fractions", "_pydecimal", "statistics", "random", "colorsys"),
        *("datetime", "_pydatetime", "calendar", "zoneinfo", "_strptime"),
    ),
    "files": (
        *("pathlib", "posixpath", "genericpath", "fileinput", "filecmp", "tempfile", "glob"),
        *("fnmatch", "shutil", "linecache", "tarfile", "zipfile", "gzip", "bz2", "lzma", "pickle"),
        *("shelve", "dbm", "sqlite3", "csv", "configparser", "plistlib", "_pyio", "os", "stat"),
    ),
    "concurrency": (
        *("asyncio", "threading", "multiprocessing", "concurrent", "subprocess", "sched"),
        *("selectors", "_threading_local", "queue"),
    ),
    "network": (
        *("socket", "ssl", "http", "urllib", "ftplib", "poplib", "imaplib", "smtplib", "uuid"),
        *("socketserver", "xmlrpc", "ipaddress", "wsgiref", "webbrowser"),
    ),
}
FEWEST_WORDS = 8  # fewer say too little for anyone to tell the area
VALIDATION_SHARE = 0.15
TEST_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Docstring:
    """The first paragraph of a docstring.

    Attributes:
        text: Words with single spaces between them.
        module: Dotted name of the file that it stands in, such as ``asyncio.locks``.
        area: Index into :data:`AREAS`.
    """

    text: str
    module: str
    area: int


def load_docstrings() -> list[Docstring]:
    """Reads all docstrings of all areas; none of their modules is imported.

    A text that stands in several places is given once.

    Raises:
        ValueError: This Python has no sources.
    """
    found: dict[str, Docstring] = {}
    for area, modules in enumerate(AREAS.values()):
        for path in _files(modules):
            for text in _texts(path):
                found.setdefault(text, Docstring(text, _module_of(path), area))
    if {docstring.area for docstring in found.values()} != set(range(len(AREAS))):
        raise ValueError(
            f"The standard library in {sysconfig.get_path('stdlib')} lacks the sources, which hold"
            " the docstrings. Use a Python that ships them."
        )
    return list(found.values())


def _files(modules: Sequence[str]) -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    for module in modules:
        single = library / f"{module}.py"
        yield from [single] if single.exists() else sorted((library / module).rglob("*.py"))


def _module_of(path: Path) -> str:
    return ".".join(path.relative_to(sysconfig.get_path("stdlib")).with_suffix("").parts)


def _texts(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            paragraph = (ast.get_docstring(node) or "").partition("\n\n")[0].split()
            if len(paragraph) >= FEWEST_WORDS:
                yield " ".join(paragraph)


def split_docstrings(
    docstrings: Sequence[Docstring], seed: int, multiple: int = 1
) -> tuple[list[Docstring], list[Docstring], list[Docstring]]:
    """Divides modules for training, validation and test, each area in about the same shares.

    Args:
        docstrings: All of them.
        seed: Seed of the division; other seeds give other modules.
        multiple: Divisor of the sizes of the last two parts; surplus docstrings are left out.

    Returns:
        The three parts. All of a module is in one of them.
    """
    chance = random.Random(seed)
    part_of = _parts_of_modules(docstrings, chance)
    train, val, test = (
        [docstring for docstring in docstrings if part_of[docstring.module] == part]
        for part in range(3)
    )
    for evaluated in (val, test):
        chance.shuffle(evaluated)
        del evaluated[len(evaluated) - len(evaluated) % multiple :]
    return train, val, test


def _parts_of_modules(docstrings: Sequence[Docstring], chance: random.Random) -> dict[str, int]:
    """Returns each module's part: 0 for training, 1 for validation, 2 for test."""
    part_of: dict[str, int] = {}
    for area in range(len(AREAS)):
        sizes = Counter(docstring.module for docstring in docstrings if docstring.area == area)
        val_room, test_room = (share * sizes.total() for share in (VALIDATION_SHARE, TEST_SHARE))
        modules = sorted(sizes)
        chance.shuffle(modules)
        for module in modules:
            if sizes[module] <= test_room:
                part_of[module], test_room = 2, test_room - sizes[module]
            elif sizes[module] <= val_room:
                part_of[module], val_room = 1, val_room - sizes[module]
            else:
                part_of[module] = 0
    return part_of
