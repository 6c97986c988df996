"""What the tests of a session will be about, before the first of them runs."""

from __future__ import annotations

from typing import Any

import pytest


def chosen(session: pytest.Session, fixture: str, parameter: str) -> list[Any]:
    """Lists a parameter's values in the tests that will run and want a fixture."""
    tests = [item for item in session.items if isinstance(item, pytest.Function)]
    return [test.callspec.params[parameter] for test in tests if fixture in test.fixturenames]
