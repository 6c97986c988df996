from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import recipes.gpt
from recipes.baselines import bigram_bits_per_byte, unigram_bits_per_byte
from recipes.gpt import GPT, build_gpt, warmup_and_decay
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


def test_the_bigram_baseline_counts_pairs() -> None:
    text = torch.tensor([0, 0, 1, 0])  # pairs 00, 01, 10
    # After byte 0: (1 + 1) / (2 + 256) for either byte; after byte 1: (1 + 1) / (1 + 256).
    expected = -(2 * math.log2(2 / 258) + math.log2(2 / 257)) / 3
    assert bigram_bits_per_byte(text, text, alpha=1.0) == pytest.approx(expected)


def test_windows_and_their_targets() -> None:
    windows = Windows(torch.arange(10), sequence_length=3, stride=3)
    assert len(windows) == 3
    inputs, targets = windows[2]
    assert (inputs.tolist(), targets.tolist()) == ([6, 7, 8], [7, 8, 9])
    with pytest.raises(ValueError, match="sequence_length=10"):
        Windows(torch.arange(10), sequence_length=10, stride=1)


def test_validation_windows_cover_the_split_without_overlap() -> None:
    data = TextDataModule(batch_size=64, sequence_length=100)
    inputs = torch.cat([batch[0] for batch in data.val_dataloader()])
    seen = inputs.flatten()
    assert torch.equal(seen, data.val_text[: len(seen)])
    assert 0 < len(data.val_text) - len(seen) <= 100


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    sampler = SeededShuffle(range(100), seed=3, num_samples=10)
    first = list(sampler)
    assert list(sampler) == first
    assert len(set(first)) == len(sampler) == 10
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_replicas_take_turns_in_the_order() -> None:
    whole = list(SeededShuffle(range(100), seed=3, num_samples=11))
    shares = [SeededShuffle(range(100), 3, 11, num_replicas=2, rank=rank) for rank in range(2)]
    assert [list(share) for share in shares] == [whole[0:10:2], whole[1:10:2]]
    assert [len(share) for share in shares] == [5, 5]  # one more would keep the other waiting


def test_replicas_have_the_batches_of_one_device_between_them() -> None:
    sizes = {"sequence_length": 16, "train_samples": 8}
    (whole,) = list(TextDataModule(batch_size=8, **sizes).train_dataloader())
    shares = []
    for rank in range(2):
        data = TextDataModule(batch_size=4, **sizes)
        kwargs = {"num_replicas": 2, "rank": rank}
        trainer: Any = SimpleNamespace(distributed_sampler_kwargs=kwargs)
        data.trainer = trainer
        (share,) = list(data.train_dataloader())
        shares.append(share)
    for index in range(2):
        assert torch.equal(shares[0][index], whole[index][0::2])
        assert torch.equal(shares[1][index], whole[index][1::2])


def test_replicas_validate_on_as_many_windows_each_and_on_none_twice() -> None:
    sizes = {"batch_size": 1000, "sequence_length": 100}
    ((whole, _),) = TextDataModule(**sizes).val_dataloader()
    shares = []
    for rank in range(3):
        data = TextDataModule(**sizes)
        trainer: Any = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 3, "rank": rank})
        data.trainer = trainer
        ((share, _),) = data.val_dataloader()
        shares.append(share)
    kept = len(whole) // 3 * 3
    assert kept < len(whole)
    for rank, share in enumerate(shares):
        assert torch.equal(share, whole[rank:kept:3])


def test_the_data_module_records_the_text() -> None:
    data = TextDataModule(batch_size=4, sequence_length=16, train_samples=8)
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == targets.shape == (4, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert len(data.hparams["text_sha256"]) == 64


def test_another_text_in_a_checkpoint_is_told() -> None:
    data = TextDataModule()
    assert data.state_dict() == {"text_sha256": data.text_sha256}
    data.load_state_dict(data.state_dict())
    with pytest.warns(UserWarning, match="same patch version of Python"):
        data.load_state_dict({"text_sha256": "0" * 64})


@pytest.mark.parametrize(
    ("argument", "value"),
    [("batch_size", 0), ("sequence_length", 0), ("sequence_length", 10**6), ("train_samples", 0)],
)
def test_bad_sizes_of_the_data(argument: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{argument}={value}"):
        TextDataModule(**{argument: value})


def test_shapes_and_size_of_the_default_model() -> None:
    module = GPT()
    assert module(torch.zeros(2, 128, dtype=torch.long)).shape == (2, 128, 256)
    # Embedding and head 2 * 256 * 64, per block 12 * 64**2, nine norms of 64.
    assert sum(p.numel() for p in module.parameters()) == 32_768 + 4 * 49_152 + 9 * 64
    assert not any("bias" in name for name, _ in module.named_parameters())


def test_the_loss_goes_down() -> None:
    torch.manual_seed(0)
    net = build_gpt(width=16, depth=1, num_heads=2)
    data = TextDataModule(batch_size=8, sequence_length=32, train_samples=8)
    inputs, targets = next(iter(data.train_dataloader()))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.0


def test_the_learning_rate_rises_and_falls() -> None:
    shares = [warmup_and_decay(step, warmup_steps=4, total_steps=10) for step in range(11)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0]
    assert shares[4:] == pytest.approx([1.0, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6, 0.0])


def test_a_learning_rate_without_warm_up_or_end() -> None:
    assert warmup_and_decay(0, warmup_steps=0, total_steps=10) == 1.0
    assert warmup_and_decay(10**6, warmup_steps=4, total_steps=math.inf) == 1.0


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
