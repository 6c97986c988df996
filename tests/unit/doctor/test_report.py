from __future__ import annotations

import json

import pytest

from lightning_dist.doctor.report import Report, Status, fail, ok
from lightning_dist.engine.common.table import Table

TABLE = Table("Links", ("rank", "MB/s"), (("0", "12"),))


def filled(*, as_json: bool = False, is_shown: bool = True) -> Report:
    report = Report(as_json, is_shown=is_shown)
    report.add("links", ok("slow", TABLE))
    report.add("disk", fail("full", "free space"))
    report.end({0: "a"}, ["clocks"])
    return report


def test_each_check_has_a_line_and_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert filled().worst is Status.FAIL
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["OK", "links", "slow"]
    assert any("MB/s" in line for line in lines)
    assert lines[-4].split() == ["FAIL", "disk", "full"]
    assert lines[-3].strip() == "-> free space"
    assert lines[-2:] == ["Not checked after that: clocks.", "1 OK, 0 WARN, 1 FAIL"]


def test_json_has_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    filled(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == "FAIL"
    assert document["hosts"] == {"0": "a"}
    assert document["not_checked"] == ["clocks"]
    links, disk = document["checks"]
    assert links["table"] == [["rank", "MB/s"], ["0", "12"]]
    assert disk == {"name": "disk", "status": "FAIL", "found": "full", "remedy": "free space"}


def test_other_ranks_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    filled(is_shown=False)
    filled(is_shown=False, as_json=True)
    assert capsys.readouterr().out == ""
