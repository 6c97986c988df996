from __future__ import annotations

from dataclasses import replace

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.planning.dry_run_report import DryRunSummary, RankKind, collapse
from lightning_dist.engine.planning.traffic import MessageKind, Traffic, TrafficLedger

GATHERS = Traffic(MessageKind.ALL_GATHER, ("dp_shard",), 3, 1_500_000)
SENDS = Traffic(MessageKind.SEND, ("pp",), 1_024, 20)
END = RankKind((0,), 2, 1_000, 1_000, 2_000, (GATHERS,))
MIDDLE = RankKind((1,), 2, 500, 500, 1_000, (GATHERS, SENDS))


def test_equal_stages_are_one_row() -> None:
    kinds = [END, MIDDLE, replace(MIDDLE, stages=(2,)), replace(END, stages=(3,))]
    first, second = collapse(kinds)
    assert first == replace(END, stages=(0, 3), num_ranks=4)
    assert second == replace(MIDDLE, stages=(1, 2), num_ranks=4)


def test_stages_that_send_otherwise_are_two_rows() -> None:
    kinds = (END, replace(END, stages=(1,), traffic=()))
    assert collapse(kinds) == kinds


def test_each_rank_has_a_kind() -> None:
    summary = DryRunSummary(MeshShape(pp=2, tp=2), (END, MIDDLE), (0, 1))
    assert [summary.kind_of(rank) for rank in range(4)] == [END, END, MIDDLE, MIDDLE]
    assert END.held_bytes == 4_000


def test_a_rank_with_several_stages_has_one_kind() -> None:
    v_placement = replace(END, stages=(0, 3)), replace(MIDDLE, stages=(1, 2))
    summary = DryRunSummary(MeshShape(pp=2), collapse(v_placement), (0, 1, 1, 0))
    assert [summary.kind_of(rank) for rank in range(2)] == list(v_placement)


def test_text() -> None:
    kinds = collapse([END, MIDDLE, replace(MIDDLE, stages=(2,)), replace(END, stages=(3,))])
    assert str(DryRunSummary(MeshShape(pp=4, tp=2), kinds, (0, 1, 2, 3))) == (
        "stage  ranks  parameters  gradients  optimizer state  in all\n"
        "0, 3       4        1 kB       1 kB             2 kB    4 kB\n"
        "1-2        4       500 B      500 B             1 kB    2 kB\n"
        "\n"
        "stage  in a step   over      count   bytes\n"
        "0, 3   all-gather  dp_shard      3  1.5 MB\n"
        "1-2    all-gather  dp_shard      3  1.5 MB\n"
        "1-2    send        pp        1,024    20 B"
    )


def test_a_ledger_adds_up_by_kind_and_axes() -> None:
    ledger = TrafficLedger()
    for kind, axes, num_bytes in [
        (MessageKind.SEND, ("pp",), 1),
        (MessageKind.ALL_GATHER, ("tp",), 10),
        (MessageKind.ALL_GATHER, ("dp_shard",), 100),
        (MessageKind.ALL_GATHER, ("tp",), 20),
    ]:
        ledger.add(kind, axes, num_bytes)
    assert ledger.traffic == (
        Traffic(MessageKind.ALL_GATHER, ("dp_shard",), 1, 100),
        Traffic(MessageKind.ALL_GATHER, ("tp",), 2, 30),
        Traffic(MessageKind.SEND, ("pp",), 1, 1),
    )
