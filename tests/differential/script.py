"""Write a case down as a script that runs it."""

from __future__ import annotations

from tests.differential.case import Case

_SCRIPT = """\
# Run it in the repository's root: PYTHONPATH=. python case.py
from tests.differential.case import Case
from tests.differential.check import check

if __name__ == "__main__":
    check({case!r})
"""


def script_of(case: Case) -> str:
    """Gives the text of a script that runs a case and prints what differs.

    Args:
        case: The case.
    """
    return _SCRIPT.format(case=case)
