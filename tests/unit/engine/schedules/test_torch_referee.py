"""torch's own validator, communication passes and orders as referees of ours.

They are private, so nothing but this test depends on them.
"""

from __future__ import annotations

import csv
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from lightning_dist.engine.schedules.csv_file import read_schedule
from lightning_dist.engine.schedules.registry import FAMILIES, build_schedule
from lightning_dist.engine.schedules.schedule import Schedule, ScheduleError

SYNCHRONOUS = [n for n, f in FAMILIES.items() if not f.update_rule.is_asynchronous]
NAMES_IN_TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zb_h1": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
}
SIZES = [(2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (8, 16)]

Orders = dict[int, list[torch_schedules._Action]]


def build(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    per_rank = FAMILIES[name].fewest_stages
    return build_schedule(name, num_stages=num_ranks * per_rank, num_microbatches=num_microbatches)


def in_torch(schedule: Schedule) -> Orders:
    return {
        rank: [torch_schedules._Action.from_str(str(action)) for action in actions]
        for rank, actions in enumerate(schedule.ranks)
    }


def referee(schedule: Schedule) -> None:
    homes = schedule.rank_of_stage
    orders, n = in_torch(schedule), schedule.num_stages
    found = torch_schedules._validate_schedule(
        orders, len(schedule.ranks), n, schedule.num_microbatches
    )
    assert found == dict(enumerate(homes))
    lowered = torch_schedules._add_send_recv(in_torch(schedule), homes.__getitem__, n)
    torch_schedules._simulate_comms_compute(lowered, homes.__getitem__, n)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_torch_finds_nothing_wrong(name: str, sizes: tuple[int, int]) -> None:
    referee(build(name, *sizes))


def test_torch_finds_what_is_wrong() -> None:
    schedule = build("1f1b", 2, 4)
    first, second = schedule.ranks
    with pytest.raises(AssertionError, match="expected 4"):
        referee(Schedule("short", 2, 4, (first, second[:-1])))
    with pytest.raises((AssertionError, ValueError)):
        referee(Schedule("stuck", 2, 4, (first, second[::-1])))


def order_of_torch(name: str, rank: int, num_ranks: int, num_microbatches: int) -> list[Any]:
    per_rank = FAMILIES[name].fewest_stages
    rounds = max(1, num_microbatches // num_ranks)
    schedule = SimpleNamespace(
        _stages=[None] * per_rank,
        _n_microbatches=num_microbatches,
        _num_stages=num_ranks * per_rank,
        num_stages=num_ranks * per_rank,
        pp_group_size=num_ranks,
        n_local_stages=per_rank,
        microbatches_per_round=num_microbatches // rounds,
    )
    of_torch = getattr(torch_schedules, NAMES_IN_TORCH[name])
    if name in ("gpipe", "1f1b"):
        return of_torch._get_pipeline_order(schedule)[rank]  # type: ignore[no-any-return]
    return of_torch._calculate_single_rank_operations(schedule, rank)  # type: ignore[no-any-return]


def test_every_synchronous_schedule_is_compared() -> None:
    """Those that torch does not have are named here."""
    assert set(SYNCHRONOUS) - NAMES_IN_TORCH.keys() == set()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", NAMES_IN_TORCH)
def test_the_order_is_that_of_torch(name: str, sizes: tuple[int, int]) -> None:
    ours = in_torch(build(name, *sizes))
    for rank in range(sizes[0]):
        theirs = [a for a in order_of_torch(name, rank, *sizes) if a and a.is_compute_op]
        if name == "1f1b":
            # torch draws this one, which it does not execute from a list, with forwards numbered
            # from 1 after the warm-up.
            kinds = [action.computation_type for action in theirs]
            assert [action.computation_type for action in ours[rank]] == kinds
        else:
            assert ours[rank] == theirs


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_file_says_what_was_written(name: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    schedule = build(name, 3, 6)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(schedule.ranks)
    n = schedule.num_stages
    found = build_schedule(f"file:{path}", num_stages=n, num_microbatches=6)
    assert (found.ranks, found.rank_of_stage) == (schedule.ranks, schedule.rank_of_stage)


def test_a_file_of_torch_is_read_with_its_communication(tmp_path: Path) -> None:
    schedule = build("zbv", 2, 4)
    homes = schedule.rank_of_stage
    lowered = torch_schedules._add_send_recv(in_torch(schedule), homes.__getitem__, 4)
    path = tmp_path / "torch.csv"
    path.write_text("".join(",".join(["", *map(str, lowered[r])]) + "\n" for r in (0, 1)))
    assert read_schedule(path).ranks == schedule.ranks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no actions"),
        ("0F0\n1F0\n", "no backwards"),
        ("0F0,0B0\n1F0,1Q0\n", "row 2, cell 2: '1Q0' is not an action"),
        (
            "0F0,0B0,0STEP0\n1F0,1B0\n",
            r"row 1, cell 3: '0STEP0' is not .*one of the kinds \['F', 'B', 'I', 'W'\]\.",
        ),
        ("0F0,0B0\n1F0\n", "misses actions: ..1B0"),
        ("0F0,0I0\n1F0,1B0\n", "misses actions: ..0W0"),
        ("7000000F0,0B0\n", "'2F0'.* and more.* stages 0 to 7000000 and micro-batches 0 to 0"),
        ("0F0,0B0,0I0,0W0\n1F0,1B0\n", "whole backwards ..0B0"),
        ("0B0,0F0\n1F0,1B0\n", "rank 0 waits with 0B0 for 0F0.*rank 1 waits with 1F0 for 0F0"),
    ],
)
def test_a_file_that_cannot_be_executed_says_why(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read_schedule(path)
    assert "mine.csv" in str(caught.value)
    executed = not message.startswith(("no ", "row "))
    assert isinstance(caught.value, ScheduleError) == executed


@pytest.mark.parametrize("cell", ["0F1000000", "1000000F0", "0W1000000"])
def test_an_index_that_is_too_large_takes_no_memory(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"0F0,{cell},0B0\n1F0,1B0\n")
    tracemalloc.start()
    with pytest.raises(ScheduleError, match="misses actions: .* and more.* 1000000"):
        read_schedule(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1e6


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.csv.*cannot be read"):
        read_schedule(tmp_path / "nowhere.csv")


def test_a_cell_without_an_end_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0," + "x" * (csv.field_size_limit() + 1))
    with pytest.raises(ValueError, match=r"mine\.csv' cannot be read: field larger than"):
        read_schedule(path)


def test_a_file_may_lie_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.csv").write_text("0F0,0B0\n")
    assert build_schedule("file:~/mine.csv", num_stages=1, num_microbatches=1).num_stages == 1


def test_a_file_of_a_spreadsheet_begins_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,0B0\n", encoding="utf-8-sig")
    assert read_schedule(path).num_stages == 1
