"""The page of schedules draws them as they are."""

from __future__ import annotations

import re
from pathlib import Path

from lightning_dist.engine.schedules import build_schedule
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES

PAGE = Path(__file__).parents[2] / "docs" / "schedules.md"
DRAWN = re.compile(
    r'```python\nbuild_schedule\("(?P<name>\w+)", (?P<sizes>.*)\)\.format_grid\(\)\n```\n\n'
    r"```text\n(?P<grid>(.+\n)+)```",
)


def test_the_page_of_schedules_draws_each_as_the_code_does() -> None:
    shown, drawn = {}, {}
    for match in DRAWN.finditer(PAGE.read_text(encoding="utf-8")):
        name = match["name"]
        sizes = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", match["sizes"])}
        shown[name] = match["grid"].rstrip("\n")
        drawn[name] = build_schedule(name, **sizes).format_grid()
    assert shown == drawn
    assert set(shown) == set(SCHEDULE_NAMES)
