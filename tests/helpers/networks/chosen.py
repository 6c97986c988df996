"""What the tests of a session will be about, before the first of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


def chosen(
    session: pytest.Session, fixture: str, parameter: str, path: Path | None = None
) -> list[Any]:
    """Lists a parameter's values in the tests that will run, have it and want a fixture.

    Args:
        session: The session.
        fixture: Name of the fixture.
        parameter: Name of the tests' parameter.
        path: The module of the fixture; None for one of all modules.
    """
    tests = [item for item in session.items if isinstance(item, pytest.Function)]
    asking = [t for t in tests if fixture in t.fixturenames and path in (None, t.path)]
    cells = [test.callspec.params for test in asking if hasattr(test, "callspec")]
    return [values[parameter] for values in cells if parameter in values]
