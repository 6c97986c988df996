from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

import lightning as L
import pytest

from lightning_dist import PipelineStrategy
from lightning_dist.strategies.base.ending import brief_errors
from lightning_dist.strategies.base.ending.brief_errors import BriefHook, is_mistake, show_briefly


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What is left to the hook before."""
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _, error, __: shown.append(error))
    return shown


def raised_by(call: Callable[[], object]) -> ValueError:
    with pytest.raises(ValueError, match=".") as caught:
        call()
    return caught.value


def end_with(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)


def misspell() -> object:
    return PipelineStrategy(schedule="1F1B")  # type: ignore[arg-type]


def divide_badly() -> object:
    return L.Trainer(accelerator="cpu", devices=2, strategy=PipelineStrategy(num_stages=3))


@pytest.mark.parametrize("make", [misspell, divide_badly])
def test_a_mistake_is_shown_with_the_users_frames_only(
    make: Callable[[], object],
    capsys: pytest.CaptureFixture[str],
    others: list[BaseException],
) -> None:
    error = raised_by(make)
    end_with(error)
    lines = capsys.readouterr().err.splitlines()
    frames = [line for line in lines if line.startswith("  File")]
    assert len(frames) == 2
    assert all(__file__ in frame for frame in frames)
    assert lines[-1] == f"ValueError: {error}"
    assert not others
    assert len(traceback.extract_tb(error.__traceback__)) > 3  # to whatever catches it


def test_what_another_rank_shows_is_not_shown_here(
    capsys: pytest.CaptureFixture[str], others: list[BaseException]
) -> None:
    error = raised_by(misspell)
    show_briefly(error, is_shown_elsewhere=True)
    end_with(error)
    assert capsys.readouterr().err == ""
    assert not others


def test_other_errors_are_shown_as_ever(others: list[BaseException]) -> None:
    raised_by(misspell)
    users = raised_by(lambda: int("x"))
    end_with(users)
    assert others == [users]
    assert not is_mistake(users)


def test_what_has_a_reason_is_shown_with_it(others: list[BaseException]) -> None:
    error = raised_by(misspell)
    error.__cause__ = KeyError("k")
    end_with(error)
    assert others == [error]


def test_hooks_do_not_pile_up() -> None:
    raised_by(misspell)
    raised_by(misspell)
    hook: object = sys.excepthook
    assert isinstance(hook, BriefHook)
    assert not isinstance(hook.otherwise, BriefHook)


def test_an_error_of_another_kind_installs_nothing() -> None:
    before = sys.excepthook
    with brief_errors.brief_mistakes(), pytest.raises(ValueError, match="x"):
        int("x")
    assert sys.excepthook is before
