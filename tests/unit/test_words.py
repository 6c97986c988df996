"""The check of words finds what it looks for, and nothing else."""

from __future__ import annotations

import pytest

from tests.helpers.words import find_words


@pytest.mark.parametrize(
    "line",
    ['"""Gives what adds up.', '    """Makes what is cut."""', "# Nobody waits.", "a rank who"],
)
def test_a_word_is_found(line: str) -> None:
    assert [number for number, _ in find_words(f"one\n{line}\n")] == [2]


@pytest.mark.parametrize("line", ['"""Makes a rank whole."""', "the whole", "Gives what", "whose"])
def test_other_words_are_left(line: str) -> None:
    assert not list(find_words(line))
