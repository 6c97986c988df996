"""The words that the sources do without: ``python -m tests.helpers.words`` lists where they stand.

A docstring begins with a verb and the object that it names, and ranks, threads and tensors are
things. Names of people's pronouns for them, and openings that name nothing, end the lint command.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("lightning_dist", "recipes")
PRONOUNS = re.compile(r"\b(who|whom|whoever|nobody|somebody|anybody)\b", re.IGNORECASE)
OPENINGS = re.compile(r'"""(Gives|Makes) what\b')


def find_words(text: str) -> Iterator[tuple[int, str]]:
    """Yields the numbers and texts of lines with such words."""
    for number, line in enumerate(text.splitlines(), 1):
        if PRONOUNS.search(line) or OPENINGS.search(line):
            yield number, line.strip()


def main() -> None:
    """Lists them, and fails if there are any."""
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, line in find_words(path.read_text(encoding="utf-8"))
    ]
    sys.exit("\n".join(found) or 0)


if __name__ == "__main__":
    main()
