from __future__ import annotations

import pytest

from recipes import compare


def test_a_trace_without_a_title_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        compare.main(["out.png", "a=one.json", "trace.json"])
    assert "trace.json has no title. Write TITLE=trace.json." in capsys.readouterr().err
