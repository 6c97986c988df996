"""The command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_dist.__main__ import main
from lightning_dist.engine.checkpoint.files import load_full, save_full


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
    for name in ("tensor", "cut", "text", "empty"):
        with pytest.raises(SystemExit):
            main(["merge", "--force", str(tmp_path / f"{name}.ckpt"), str(target)])
        assert f"{name}.ckpt is no" in capsys.readouterr().err
        assert target.read_text() == "precious"
