"""The line that a repartition prints."""

from __future__ import annotations

from lightning_dist.engine.pipeline.rebalance.repartition import Repartition
from lightning_dist.engine.planning.partition import Move


def test_neighbouring_layers_with_the_same_way_are_named_together() -> None:
    moves = (Move(1, 1, 0), Move(2, 1, 0), Move(3, 1, 0), Move(5, 1, 0), Move(6, 2, 1))
    assert str(Repartition((4, 2, 3), moves, 0.25)) == (
        "The pipeline has [4, 2, 3] layers per stage now. Moved in 0.25 s:"
        " 1 to 3 (rank 1 to 0), 5 (rank 1 to 0), 6 (rank 2 to 1)."
    )


def test_no_move_is_said() -> None:
    assert str(Repartition((4, 5))).endswith("Moved in 0.00 s: none between ranks.")
