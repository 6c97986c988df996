"""The command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_dist.__main__ import main
from lightning_dist.engine.checkpoint.files import load_full, save_full, save_sharded


def test_merge_overwrites_only_with_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.ckpt", tmp_path / "out.ckpt"
    save_full({"state_dict": {"weight": torch.ones(2)}}, source)
    target.write_text("precious")
    with pytest.raises(SystemExit):
        main(["merge", str(source), str(target)])
    assert "add --force" in capsys.readouterr().err
    assert target.read_text() == "precious"
    main(["merge", "--force", str(source), str(target)])
    assert torch.equal(load_full(target)["state_dict"]["weight"], torch.ones(2))
    assert "1 tensors of weights" in capsys.readouterr().out


def test_merge_names_what_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, target = tmp_path / "whole.ckpt", tmp_path / "out.ckpt"
    save_full({"state_dict": {"weight": torch.ones(99)}}, whole)
    target.write_text("precious")
    torch.save(torch.ones(1), tmp_path / "tensor.ckpt")
    (tmp_path / "cut.ckpt").write_bytes(whole.read_bytes()[:-99])
    (tmp_path / "text.ckpt").write_text("no checkpoint at all")
    (tmp_path / "empty.ckpt").touch()
    others = {"key": "hello", "index": "u", "number": "X.f;", "letters": "Xr<\x99e"}
    for name, text in others.items():
        (tmp_path / f"{name}.ckpt").write_text(text, encoding="latin-1")
    for name in ("tensor", "cut", "text", "empty", *others):
        with pytest.raises(SystemExit):
            main(["merge", "--force", str(tmp_path / f"{name}.ckpt"), str(target)])
        assert f"{name}.ckpt is no" in capsys.readouterr().err
        assert target.read_text() == "precious"


@pytest.mark.parametrize("out", ["runs", "notes"])
def test_a_directory_of_other_files_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    source = tmp_path / "runs" / "in.ckpt"
    save_full({"state_dict": {"weight": torch.ones(2)}}, source)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "precious.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    for words in (["merge"], ["export", "--format", "torch"]):
        with pytest.raises(SystemExit):
            main([*words, "--force", str(source), str(tmp_path / out)])
        assert "directory of other files" in capsys.readouterr().err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_never_takes_the_place_of_a_directory_around_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    around = tmp_path / "some.ckpt"
    save_sharded({"state_dict": {"weight": torch.ones(2)}}, around, None)
    save_full({"state_dict": {"weight": torch.ones(2)}}, around / "in.ckpt")
    with pytest.raises(SystemExit):
        main(["merge", "--force", str(around / "in.ckpt"), str(around)])
    assert "would be replaced" in capsys.readouterr().err
    main(["merge", "--force", str(around), str(around)])  # which is asked for
    assert around.is_file()


@pytest.mark.parametrize("words", [("", "out.ckpt"), ("in.ckpt", ""), ("in.ckpt", ".")])
def test_an_empty_name_is_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    for command in (["merge"], ["export", "--format", "torch"]):
        with pytest.raises(SystemExit):
            main([*command, *words])
        assert "name a file" in capsys.readouterr().err
