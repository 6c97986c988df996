from __future__ import annotations

import pytest

from recipes.class_baselines import bag_of_words_accuracy, majority_accuracy


def test_the_majority_by_hand() -> None:
    assert majority_accuracy([0, 1, 1, 2, 1], [1, 0, 1, 2]) == 0.5


def test_words_tell_classes_that_order_does_not() -> None:
    train = (["open the file", "close the file", "send a packet", "drop a packet"], [0, 0, 1, 1])
    test = (["file the report", "packet of a host", "words never seen"], [0, 1, 1])
    assert bag_of_words_accuracy(train, train, test) == pytest.approx(1.0, abs=0.34)
    order = (["one then two", "two then one"] * 2, [0, 1] * 2)
    assert bag_of_words_accuracy(order, order, order) == 0.5
