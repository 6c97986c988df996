from __future__ import annotations

import pytest

from lightning_dist.engine.common.names import nearest
from lightning_dist.engine.schedules.registry import find_family


@pytest.mark.parametrize(
    ("wanted", "question"),
    [
        ("1F1B", " Did you mean '1f1b'"),
        ("gpip", " Did you mean 'gpipe'?"),
        ("block", " Did you mean 'Block' or 'block'?"),
        ("tensor", ""),
    ],
)
def test_names_that_are_near(wanted: str, question: str) -> None:
    assert nearest(wanted, ["gpipe", "1f1b", "Block", "block"]).startswith(question)
    assert bool(question) or not nearest(wanted, ["gpipe", "1f1b"])


def test_a_schedule_in_capitals() -> None:
    with pytest.raises(ValueError, match=r"'1F1B' is unknown. Did you mean '1f1b'.* Use one of"):
        find_family("1F1B")
