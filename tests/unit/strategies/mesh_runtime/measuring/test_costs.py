from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.microbatch import split
from lightning_dist.engine.tensors.skeleton import skeleton_of
from lightning_dist.engine.tensors.tree import map_tensors
from lightning_dist.strategies.mesh_runtime.measuring.costs import (
    Measurement,
    memory_of,
    parameters_per_layer,
    sizes_to_measure,
)
from recipes.gpt import GPT

TOKENS = torch.zeros(4, 16, dtype=torch.int64)
META = Measurement(device=torch.device("meta"), flops_per_second=1e9, tensor_sizes=(2, 3))


class Whole(L.LightningModule):
    """No sequence, a BatchNorm, and a step that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.num_steps = 0

    def training_step(self, batch: Tensor) -> dict[str, Any]:
        self.num_steps += 1
        out = self.last(self.norm(self.first(batch)).relu() + batch)
        self.log("loss", out.mean())
        return {"loss": out.square().mean()}


def test_a_device_that_is_not_there_counts_operations() -> None:
    module = skeleton_of(GPT(width=32, depth=2, num_heads=2))
    costs = META.costs(module, map_tensors(lambda t: t.to("meta"), (TOKENS, TOKENS)))
    assert [batch.num_samples for batch in costs.batches] == [1, 2, 4]
    assert costs.adding_seconds == 0.0
    embedding, block, _, head = costs.batches[-1].step.layers
    matrices = 12 * 32 * 32  # multiplied with each of the 64 tokens, twice the operations
    attention = 2 * 2 * 16 * 32  # scores and mixture
    assert block.forward_seconds == pytest.approx(64 * (2 * matrices + attention) / 1e9, rel=0.5)
    assert block.backward_seconds > block.forward_seconds > embedding.forward_seconds
    assert block.boundary_bytes == 4 * 16 * 32 * 4
    assert head.parameter_bytes == 4 * (32 + 32 * 256)
    assert costs.can_cut
    assert not costs.whole_batches
    assert costs.tensor.keys() == {2}  # three ranks cannot share two heads
    # Of each block the two projections back, of the vocabulary the embedding and the head.
    assert costs.tensor[2].num_messages == 2 * (2 * 2 + 2)


def test_bytes_are_those_of_a_real_step() -> None:
    module = GPT(width=32, depth=2, num_heads=2)
    costs = Measurement().costs(module, (TOKENS, TOKENS))
    assert 0.0 < costs.adding_seconds < 1e-6
    assert costs.sample_bytes == 2 * 16 * 8  # tokens and targets
    real = costs.batches[-1]
    counted = META.costs(
        skeleton_of(module), map_tensors(lambda t: t.to("meta"), (TOKENS, TOKENS))
    ).batches[-1]
    for own, other in zip(real.step.layers, counted.step.layers, strict=True):
        assert own.activation_bytes == pytest.approx(other.activation_bytes, rel=0.15)
        assert own.parameter_bytes == other.parameter_bytes
    assert real.rest_bytes > 4 * 16 * 256 * 4  # the loss keeps log-probabilities


class Wide(L.LightningModule):
    """Keeps little, and needs much more for a moment: a gradient of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 1, bias=False))

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layers(batch).mean()


class WithHead(Wide):
    """Has a head behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 32, bias=False)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.head(self.layers(batch)).mean()


def test_what_a_step_uses_behind_the_layers_counts_for_the_last() -> None:
    costs = Measurement().costs(WithHead(), torch.ones(2, 64))
    assert costs.can_cut
    sizes = [layer.parameter_bytes for layer in costs.batches[0].step.layers]
    assert sizes == [64 * 64 * 4, (64 + 32) * 4]


class Positioned(L.LightningModule):
    """Is a model with blocks, and holds parameters ahead of them and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.gain = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(32))
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        self.head = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.gain

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).mean()  # type: ignore[no-any-return]


def test_parameters_beside_blocks_count_for_the_first_layer_and_the_last() -> None:
    costs = Measurement().costs(Positioned(), torch.ones(2, 64))
    assert costs.can_cut
    layers = costs.batches[-1].step.layers
    assert [layer.parameter_bytes for layer in layers] == [65 * 64 * 4, (96 * 64 + 32) * 4]
    assert layers[0].boundary_bytes == 2 * 64 * 4


@pytest.mark.parametrize(("states", "update"), [(2, 2), (0, 0)])
def test_moments_of_a_backward_and_an_update(states: int, update: int) -> None:
    matrix = 64 * 64 * 4
    costs = Measurement(states_per_parameter=states).costs(Wide(), torch.ones(2, 64))
    for batch in costs.batches:
        wide, last = batch.step.layers
        # The gradient of its output, and a new one of its weights. The batch is there before.
        row = batch.num_samples * 64 * 4
        assert matrix - row <= wide.transient_bytes <= matrix + row
        assert last.transient_bytes <= 3 * row
    assert update * matrix <= costs.update_bytes <= update * matrix + 64
    assert not costs.updates_together
    counted = META.costs(skeleton_of(Wide()), torch.ones(2, 64, device="meta"))
    assert counted.update_bytes == 0


def test_a_measurement_leaves_no_trace() -> None:
    module = Whole().eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random = torch.get_rng_state()
    costs = Measurement().costs(module, torch.randn(8, 8, generator=torch.Generator()))
    assert not costs.can_cut
    assert costs.whole_batches
    assert [layer.name for layer in costs.batches[0].step.layers] == ["first", "norm", "last"]
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert module.num_steps == 0
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_step_that_fails_is_explained() -> None:
    with pytest.raises(RuntimeError) as error:
        Measurement().costs(Whole(), torch.randn(8, 3))
    assert "to measure it" in error.value.__notes__[0]
    with pytest.raises(ValueError, match="no samples"):
        Measurement().costs(Whole(), {"name": "x"})


def test_parameters_of_a_layer_that_has_some() -> None:
    class Uneven(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            frozen = nn.Linear(2, 2).requires_grad_(False)
            self.layers = nn.Sequential(
                nn.Linear(2, 2), nn.Tanh(), nn.Sequential(*map(nn.Linear, (2, 2), (2, 2))), frozen
            )

    assert parameters_per_layer(Uneven()) == 3  # of layers with 2, 0, 4 and 0
    assert parameters_per_layer(L.LightningModule()) == 1


def test_sparse_gradients_are_updated_with() -> None:
    class Sparse(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(8, 4, sparse=True)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.embed(batch).square().mean()

    costs = Measurement().costs(Sparse(), torch.zeros(2, 3, dtype=torch.int64))
    assert costs.batches[-1].step.update_seconds > 0


def test_a_gpu_keeps_memory_for_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert 90 <= memory_of(torch.device("cuda", 0), 8) <= 95


@pytest.mark.parametrize("at_least", [1, 2])
def test_each_batch_can_be_cut_into_what_is_measured(at_least: int) -> None:
    for num_samples in range(1, 65):
        sizes = sizes_to_measure(num_samples, at_least)
        pieces = [
            split(torch.ones(num_samples), -(-num_samples // n))[0].num_samples for n in sizes
        ]
        assert pieces == sizes == sorted({*sizes}, reverse=True)


def test_measures_a_batch_of_seven() -> None:
    costs = META.costs(skeleton_of(Wide()), torch.ones(7, 64, device="meta"))
    assert [batch.num_samples for batch in costs.batches] == [1, 2, 4, 7]


class Tied(L.LightningModule):
    """Has a head with the table's weight, a frozen layer between them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False).eval()
        self.net = nn.Sequential(nn.Embedding(10, 4), frozen, nn.Linear(4, 10, bias=False))
        self.net[2].weight = self.net[0].weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch), batch)


def test_tied_frozen_and_buffers_are_told_apart() -> None:
    costs = Measurement().costs(Tied(), torch.zeros(4, dtype=torch.int64))
    layers = costs.batches[0].step.layers
    assert [layer.parameter_bytes for layer in layers] == [160, 0, 160]
    assert [layer.tied_bytes for layer in layers] == [0, 0, 160]
    assert [layer.frozen_bytes for layer in layers] == [0, (4 * 4 + 4 + 2 * 4) * 4, 0]
    assert [layer.buffer_bytes for layer in layers] == [0, 2 * 4 * 4 + 8, 0]
    assert costs.parameter_bytes == 160
    whole, staged = (costs.at(4, num_microbatches=n).step.layers for n in (None, 2))
    assert [layer.parameter_bytes for layer in whole] == [160, 0, 0]
    assert [layer.parameter_bytes for layer in staged] == [160, 0, 160]
