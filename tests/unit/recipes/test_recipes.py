from __future__ import annotations

import inspect
import math

import pytest
import torch

import recipes.gpt
from recipes.baselines import bigram_bits_per_byte, unigram_bits_per_byte
from recipes.gpt import GPT, build_gpt
from recipes.text import SeededShuffle, TextDataModule, Windows, load_text, split_text


def test_the_baselines_on_the_real_text() -> None:
    train, val = split_text(load_text())
    assert len(val) / (len(train) + len(val)) == pytest.approx(0.1, abs=1e-3)
    assert unigram_bits_per_byte(train, val) == pytest.approx(4.68, abs=0.02)
    assert bigram_bits_per_byte(train, val) == pytest.approx(3.34, abs=0.02)


def test_the_baselines_by_hand() -> None:
    coin = torch.tensor([0, 1] * 500)
    assert unigram_bits_per_byte(coin, coin, alpha=0.0) == pytest.approx(1.0)
    assert bigram_bits_per_byte(coin, coin, alpha=1e-9) == pytest.approx(0.0, abs=1e-6)


def test_windows_and_their_targets() -> None:
    windows = Windows(torch.arange(10), sequence_length=3, stride=3)
    assert len(windows) == 3
    inputs, targets = windows[2]
    assert (inputs.tolist(), targets.tolist()) == ([6, 7, 8], [7, 8, 9])
    with pytest.raises(ValueError, match="sequence_length=10"):
        Windows(torch.arange(10), sequence_length=10, stride=1)


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    sampler = SeededShuffle(range(100), seed=3, num_samples=10)
    first = list(sampler)
    assert list(sampler) == first
    assert len(set(first)) == len(sampler) == 10
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_the_data_module_records_the_text() -> None:
    data = TextDataModule(batch_size=4, sequence_length=16, train_samples=8)
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len(data.hparams["text_sha256"]) == 64


def test_no_logit_sees_a_later_byte() -> None:
    torch.manual_seed(0)
    net = build_gpt(width=16, depth=2, num_heads=2)
    text = torch.randint(0, 256, (1, 12))
    changed = text.clone()
    changed[0, 7] = (changed[0, 7] + 1) % 256
    before, after = net(text), net(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_positions_matter() -> None:
    torch.manual_seed(0)
    net = build_gpt(width=16, depth=1, num_heads=2)
    logits = net(torch.tensor([[5, 9, 5, 9, 5]]))
    assert not torch.allclose(logits[0, 2], logits[0, 4])


def test_a_fresh_model_knows_nothing() -> None:
    torch.manual_seed(0)
    module = GPT(width=16, depth=1, num_heads=2)
    batch = torch.randint(0, 256, (4, 33))
    loss = module._loss((batch[:, :-1], batch[:, 1:]))
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=0.1)


def test_the_module_knows_nothing_of_pipelines() -> None:
    code = inspect.getsource(recipes.gpt.GPT).lower()
    for word in ("pipeline", "stage", "microbatch", "rank", "dist."):
        assert word not in code


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match=r"width=10.*num_heads=8"):
        build_gpt(width=10, num_heads=4)
