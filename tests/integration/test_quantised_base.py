"""A frozen base in integers with adapters on it, as quantised fine-tuning has."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from tests.helpers.networks.models import make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool

STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "stages": lambda: PipelineStrategy(num_microbatches=2),
    "tensor": lambda: TensorParallelStrategy(plan="auto"),
    "replicas": lambda: MeshStrategy(dp_replicate=2),
}


class QuantisedLinear(nn.Module):
    """A linear layer whose weights are integers and a scale, with an adapter of rank 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.scale = weight.abs().max().item() / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), False)
        self.down = nn.Parameter(0.1 * torch.randn(2, width))
        self.up = nn.Parameter(0.1 * torch.randn(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.weight.to(x.dtype) * self.scale).T + x @ self.down.T @ self.up.T


class Adapted(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (layer for _ in range(4) for layer in (QuantisedLinear(8), nn.Tanh()))
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.5)


def train(name: str, num_ranks: int, num_replicas: int) -> dict[str, Tensor]:
    data = torch.randn(32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = data[int(os.environ["RANK"]) :: num_replicas] if num_replicas > 1 else data
    module = Adapted().double()
    trainer = make_trainer(devices=num_ranks, strategy=STRATEGIES[name]())
    trainer.fit(module, DataLoader(TensorDataset(own), batch_size=8 // num_replicas))
    return state_of(module)


@pytest.mark.some("stages-1")
@pytest.mark.parametrize(("name", "num_replicas"), [("ddp", 2), ("fsdp", 2), ("stages", 1)])
def test_adapters_on_integers_train_as_on_one_device(
    workers: WorkerPool, name: str, num_replicas: int
) -> None:
    (alone,) = workers.run(1, train, "one", 1, 1)
    parts = workers.run(2, train, name, 2, num_replicas)
    together = {key: value for part in parts for key, value in part.items()}
    assert alone["model.0.weight"].dtype == together["model.0.weight"].dtype == torch.int8
    for key, value in alone.items():
        torch.testing.assert_close(together[key], value, rtol=0, atol=1e-12)


class FourBits(L.LightningModule):
    """A Llama whose linear layers bitsandbytes has quantised, with peft's adapters."""

    def __init__(self, base: Path) -> None:
        import peft
        from transformers import BitsAndBytesConfig, LlamaForCausalLM

        super().__init__()
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        model = LlamaForCausalLM.from_pretrained(
            base, quantization_config=config, device_map={"": "cpu"}, dtype=torch.float32
        )
        torch.manual_seed(0)
        targets = ["q_proj", "v_proj"]
        lora = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft's, of transformers
            self.model = peft.get_peft_model(model, lora)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.5)


def train_four_bits(
    base: Path, name: str, num_ranks: int, num_replicas: int
) -> dict[str, Tensor] | str:
    data = torch.randint(0, 64, (32, 16), generator=torch.Generator().manual_seed(1))
    own = data[int(os.environ["RANK"]) :: num_replicas]
    module = FourBits(base).train()
    trainer = make_trainer(devices=num_ranks, strategy=STRATEGIES[name]())
    try:
        trainer.fit(module, DataLoader(TensorDataset(own), batch_size=8 // num_replicas))
    except ValueError as error:
        return str(error)
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    return {n: value for n, value in state_of(module).items() if n in trained}


@pytest.fixture
def base(tmp_path: Path) -> Path:
    pytest.importorskip("bitsandbytes", reason="pip install bitsandbytes")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=64, num_attention_heads=4, use_cache=False, **sizes)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_replicas"), [("ddp", 2), ("replicas", 2), ("stages", 1), ("tensor", 1)]
)
def test_adapters_on_four_bits_train_as_on_one_device(
    workers: WorkerPool, base: Path, name: str, num_replicas: int
) -> None:
    (alone,) = workers.run(1, train_four_bits, base, "one", 1, 1)
    parts = workers.run(2, train_four_bits, base, name, 2, num_replicas)
    together = {key: value for part in parts for key, value in part.items()}
    assert len(alone) == len(together) == 16
    for key, value in alone.items():  # bitsandbytes computes in fp32
        torch.testing.assert_close(together[key], value, rtol=0, atol=1e-5)


@pytest.mark.long
def test_four_bits_are_not_sharded(workers: WorkerPool, base: Path) -> None:
    for message in workers.run(2, train_four_bits, base, "fsdp", 2, 2):
        assert "q_proj.base_layer.weight' is a Params4bit, which FSDP2 would replace" in message
