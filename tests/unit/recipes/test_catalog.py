"""What recipes say of themselves, and the command line that lists, runs and checks them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.__main__ import main
from recipes.catalog import Recipe, Result, find_recipes, read_recipe

TABLE = """
│ validation       │ 2.076 bits per byte (beats both baselines) │
│ test accuracy    │ 98.33% (354 of 360 images) │
│ throughput       │ 44,740 tokens per second │
"""


def write_recipe(folder: Path, entries: str) -> Path:
    path = folder / "one.yaml"
    path.write_text(f"recipe:\n  shows: something\n  seconds: 3\n{entries}")
    return path


def test_each_configuration_says_what_it_shows_and_what_to_expect() -> None:
    recipes = find_recipes()
    assert {"gpt_pipedream", "digits_ddp", "bert_tp"} <= {path.stem for path in recipes}
    for path, recipe in recipes.items():
        assert recipe.seconds > 0, path
        first, *_ = recipe.words(path)
        assert first == sys.executable


def test_a_result_is_read_from_the_row_that_is_printed_last() -> None:
    assert Result("validation", (2.0, 2.1)).read("validation 9.5\n" + TABLE) == 2.076
    assert Result("test accuracy", (97, 100)).read(TABLE) == 98.33
    assert Result("throughput", (0, 1)).read(TABLE) == 44740
    with pytest.raises(ValueError, match="no line with 'loss'"):
        Result("loss", (0, 1)).read(TABLE)


def test_the_list_has_a_row_for_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for path in find_recipes():
        assert f"│ {path.stem} " in printed
    assert "validation 2.04 to 2.11 bits per byte" in " ".join(printed.split())


def test_a_script_is_a_recipe_by_a_file_with_its_command(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "  command: torchrun --nproc-per-node=2 -m x {config}\n")
    words = read_recipe(path).words(path, ["--y"])
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    assert words == [sys.executable, *launcher, "-m", "x", str(path), "--y"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("  colour: red\n", "unexpected keyword argument 'colour'"),
        ("  result: {row: loss}\n", "between"),
        ("  result: {row: loss, between: [3, 2]}\n", "smaller value first"),
    ],
)
def test_wrong_entries_are_named(tmp_path: Path, entries: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_recipe(write_recipe(tmp_path, entries))


def test_a_file_without_the_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    path.write_text("trainer: {}\n")
    with pytest.raises(ValueError, match="one.yaml has no key `recipe`"):
        read_recipe(path)


def test_an_unknown_name_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "gpt_nothing"]) == 2
    error = capsys.readouterr().err
    assert "no recipe 'gpt_nothing'" in error
    assert "gpt_pipedream" in error


def test_what_is_missing_is_named_with_its_install_line() -> None:
    recipe = Recipe("something", 3, needs={"json": "pip install json", "no_such": "pip install it"})
    assert recipe.missing() == "pip install it"
    assert Recipe("something", 3).missing() is None


@pytest.mark.parametrize(
    ("printed", "status", "verdict", "failures"),
    [
        ("validation 2.05", 0, "2.05, expected validation 2 to 2.1", 0),
        ("validation 2.2", 0, "FAILED, 2.2, expected validation 2 to 2.1", 1),
        ("nothing", 0, "FAILED, The run has printed no line", 1),
        ("validation 2.05", 3, "FAILED, status 3", 1),
    ],
)
def test_a_check_compares_with_the_documented_band(
    printed: str,
    status: int,
    verdict: str,
    failures: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = write_recipe(tmp_path, "  result: {row: validation, between: [2.0, 2.1]}\n")
    monkeypatch.setattr("recipes.__main__.find_recipes", lambda names: {path: read_recipe(path)})

    def run(words: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, status, printed)

    monkeypatch.setattr(subprocess, "run", run)
    assert main(["check", "one"]) == failures
    assert f"one: {verdict}" in capsys.readouterr().out
