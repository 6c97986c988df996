"""A checkpoint of one file that is cut off is named where it is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_dist import DDPStrategy
from lightning_dist.engine.checkpoint.files import load_full
from lightning_dist.engine.checkpoint.mapped import load_mapped


def resume(path: Path) -> Any:
    return DDPStrategy().checkpoint_io.load_checkpoint(path, weights_only=True)


@pytest.mark.parametrize("read", [resume, load_full, partial(load_mapped, scratch=Path())])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_a_file_that_is_cut_off_is_named(
    tmp_path: Path, read: Callable[[Path], Any], share: float
) -> None:
    file = tmp_path / "last.ckpt"
    weights = {str(index): torch.rand(3000) for index in range(9)}
    torch.save({"state_dict": weights}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(share * len(whole))])
    if share == 1.0:
        assert read(file)["state_dict"].keys() == weights.keys()
        return
    with pytest.raises(ValueError, match=r"last\.ckpt is no checkpoint, or "):
        read(file)


def test_other_errors_stay(tmp_path: Path) -> None:
    for read in (resume, load_full):
        with pytest.raises(FileNotFoundError):
            read(tmp_path / "none.ckpt")
