"""Arguments of ``PipelineStrategy`` that are refused before there is a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_dist import PipelineStrategy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "zigzag"}, "zigzag.*gpipe"),
        ({"schedule": "file:nowhere.csv"}, r"nowhere\.csv.*cannot be read"),
        ({"stages_per_rank": 0}, "stages_per_rank=0"),
        ({"num_stages": 0}, "num_stages=0"),
        ({"num_microbatches": -1}, "num_microbatches=-1"),
        ({"schedule": "pipedream", "num_microbatches": 2}, "num_microbatches=2.*pipedream"),
        ({"weight_versions": "many"}, "many.*stash"),
        ({"staleness_correction": "lr"}, "staleness_correction='lr'.*1f1b"),
        ({"staleness_correction": "predict"}, "staleness_correction='predict'.*1f1b.*stale"),
        ({"staleness_correction": "lr", "schedule": "pipedream_2bw"}, "'lr'.*2bw.*'predict'"),
        ({"staleness_correction": "guess", "schedule": "pipedream"}, "guess.*predict"),
        (
            {
                "staleness_correction": "predict",
                "schedule": "pipedream",
                "weight_versions": "none",
            },
            "predict.*weight_versions='none'",
        ),
        ({"correction_steps": 0, "schedule": "pipedream"}, "correction_steps=0"),
        ({"weight_versions": "none", "schedule": "pipedream_2bw"}, "none.*pipedream_2bw"),
        ({"partition": "best"}, "best.*uniform"),
        ({"partition": [0, 8]}, r"\[0, 8\].*integer of at least 1"),
        ({"partition": [4.0, 4.0]}, r"\[4\.0, 4\.0\].*integer"),
        ({"partition": None}, "partition=None.*layers per stage"),
        ({"partition": []}, r"partition=\[\].*layers per stage"),
        ({"schedule": None}, "schedule=None.*'1f1b'"),
        ({"layers": 3}, "layers=3.*'auto'"),
        ({"timeout_s": 0.0}, "timeout_s=0"),
    ],
)
def test_arguments_are_checked_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(**arguments)


def test_a_file_that_deadlocks_says_which_ranks_wait_for_what(tmp_path: Path) -> None:
    path = tmp_path / "stuck.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n")
    message = r"deadlocks: rank 0 waits with 0B0 for 1B0; rank 1 waits with 1F1 for 0F1"
    with pytest.raises(ValueError, match=message):
        PipelineStrategy(schedule=f"file:{path}")
