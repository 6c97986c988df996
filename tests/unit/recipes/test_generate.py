"""Generation with a cache, and exported models that are read for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_dist.__main__ import main as command
from lightning_dist.engine.checkpoint.files import save_full
from recipes.generate import generate, load_exported, main
from recipes.gpt import GPT
from recipes.resnet import ResNet

PROMPTS = torch.arange(21).view(3, 7)


def test_a_cache_changes_no_token() -> None:
    torch.manual_seed(0)
    model = GPT(width=16, depth=2, num_heads=2).double().model
    tokens = PROMPTS
    for _ in range(9):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    found = generate(model, PROMPTS, 9)
    assert torch.equal(found, tokens[:, 7:])
    assert len(found.unique()) > 4, "a model that repeats one token would show nothing"
    assert torch.equal(model(PROMPTS)[:, -1:].argmax(-1), tokens[:, 7:8]), "no cache is left"


def test_stages_read_their_own_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = GPT(width=16, depth=3, num_heads=2)
    checkpoint = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    save_full(checkpoint, tmp_path / "in.ckpt")
    source, target = str(tmp_path / "in.ckpt"), str(tmp_path / "gpt.safetensors")
    command(["export", source, target, "--format", "safetensors", "--prefix", "model."])
    parts = [load_exported(target, stage, 2) for stage in range(2)]
    assert all(parts)
    assert torch.equal(parts[1](parts[0](PROMPTS)), module(PROMPTS))
    main([target, "ab", "abc", "--tokens", "3"])
    assert capsys.readouterr().out.count("ab") >= 2


def test_other_files_are_refused(tmp_path: Path) -> None:
    save_full({"state_dict": ResNet().state_dict()}, tmp_path / "in.ckpt")
    source, target = str(tmp_path / "in.ckpt"), str(tmp_path / "out")
    command(["export", source, target, "--format", "safetensors"])
    with pytest.raises(ValueError, match="no GPT of this recipe"):
        load_exported(target)
    with pytest.raises(ValueError, match="no GPT of this recipe"):
        load_exported(source)
    with pytest.raises(ValueError, match="no file"):
        load_exported(tmp_path / "none")
