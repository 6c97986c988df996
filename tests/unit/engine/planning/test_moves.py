from __future__ import annotations

from lightning_dist.engine.planning.partition import Move, find_moves


def test_a_line_that_moves_takes_the_layers_between_along() -> None:
    assert find_moves((3, 1), (1, 3), (0, 1)) == (Move(1, 0, 1), Move(2, 0, 1))
    assert find_moves((1, 3), (3, 1), (0, 1)) == (Move(1, 1, 0), Move(2, 1, 0))
    assert find_moves((2, 2), (2, 2), (0, 1)) == ()


def test_layers_pass_a_stage() -> None:
    assert find_moves((4, 1, 1), (1, 1, 4), (0, 1, 2)) == (
        Move(1, 0, 1),
        Move(2, 0, 2),
        Move(3, 0, 2),
        Move(4, 1, 2),
    )


def test_between_stages_of_one_rank_nothing_is_sent() -> None:
    # In a V: rank 1 has the two stages in the middle.
    assert find_moves((1, 2, 1, 1), (1, 1, 2, 1), (0, 1, 1, 0)) == ()
    assert find_moves((1, 1, 1, 2), (2, 1, 1, 1), (0, 1, 0, 1)) == (
        Move(1, 1, 0),
        Move(2, 0, 1),
        Move(3, 1, 0),
    )
