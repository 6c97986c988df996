"""Adapters by peft beside grouped heads, gates, and GPT-2's stacked, transposed layers."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import TensorParallelStrategy
from lightning_dist.engine.tensors.dtensor import is_dtensor, whole
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

peft = pytest.importorskip("peft", reason="peft, of the extra `lora`, is not installed")

ROWS = 64


def base(kind: str) -> tuple[Any, list[str]]:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if kind == "gpt2":
        none = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
        stacked = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=ROWS, **none)
        return GPT2LMHeadModel(stacked), ["c_attn", "c_proj", "c_fc"]
    grouped = LlamaConfig(
        hidden_size=32,
        intermediate_size=ROWS,  # as many as rows: no adapted layer may be taken for the head
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=ROWS,
    )
    return LlamaForCausalLM(grouped), ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


class Adapted(L.LightningModule):
    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        model, targets = base(kind)
        options = {"r": 4, "lora_dropout": dropout, "target_modules": targets}
        self.model = peft.get_peft_model(model, peft.LoraConfig(**options))
        for name, parameter in self.named_parameters():
            if "lora_B" in name:  # zeros at first, which would hide the other matrix
                torch.nn.init.normal_(parameter, std=0.1)
        self.losses: list[float] = []
        self.double()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        logits = self.model(input_ids=batch).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def train(
    kind: str, strategy: dict[str, Any] | None, dropout: float = 0.0
) -> tuple[list[float], dict[str, Tensor], int]:
    """Trains three steps; gives losses, adapters, and how many of their matrices are cut."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft and transformers
        module = Adapted(kind, dropout)
        data = torch.randint(0, ROWS, (12, 8), generator=torch.Generator().manual_seed(1))
        devices, chosen = (
            (1, "auto") if strategy is None else (2, TensorParallelStrategy(**strategy))
        )
        options = {"max_epochs": 1, "gradient_clip_val": 0.3}
        make_trainer(devices=devices, strategy=chosen, **options).fit(
            module, DataLoader(data, batch_size=4)
        )
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    num_cut = sum(map(is_dtensor, trained.values()))
    return module.losses, {name: whole(p.detach()).clone() for name, p in trained.items()}, num_cut


@pytest.mark.long
@pytest.mark.parametrize("strategy", [{}, {"sequence_parallel": True}], ids=["", "sequence"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_adapted_layers_are_cut_and_equal_one_device(
    workers: WorkerPool, kind: str, strategy: dict[str, Any]
) -> None:
    ((losses, adapters, _),) = workers.run(1, train, kind, None)
    for found in workers.run(2, train, kind, strategy):
        assert found[0] == pytest.approx(losses, abs=1e-12)
        assert found[1].keys() == adapters.keys()
        assert found[2] == len(adapters) // 2
        for name, value in found[1].items():
            torch.testing.assert_close(value, adapters[name], rtol=0, atol=1e-12)


@pytest.mark.long
def test_ranks_stay_equal_with_dropout_before_adapters(workers: WorkerPool) -> None:
    one, other = (adapters for _, adapters, _ in workers.run(2, train, "llama", {}, 0.3))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
