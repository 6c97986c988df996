from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.setting import missing_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and skips them, with the reason, where there is no GPU."""
    reason = missing_gpu()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
