"""Layers that are written or called in less usual ways, sharded, do what they do alone."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_dist.engine.tensor_parallel.apply import TensorParallelModule
from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.plan.discovery import find_plan
from tests.helpers.processes.workers import WorkerPool
from tests.helpers.spread_parity import largest_difference

WIDTH, ROWS = 8, 10
TOLERANCE = 1e-12


class ScaledEmbedding(nn.Embedding):
    """As transformers has one."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3


class Attention(nn.Module):
    """Lists its output projection first; takes query, key and value apart."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        projected = self.q(query), self.k(key), self.v(value)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in projected)
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class FusedAttention(nn.Module):
    """Lists its output projection first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 2
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Adds in place, and has heads of its own beside an MLP."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH, bias=False)
        self.num_heads = 2

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if isinstance(self.attention, FusedAttention):
            mixed = self.attention(x)
        else:
            others = (x, x) if memory is None else (memory, memory)
            mixed = self.attention(x, *others)
        mixed += x
        hidden = self.up(mixed).relu()
        lower, upper = mixed.chunk(self.num_heads, dim=-1)
        mixed = torch.cat([upper, lower], dim=-1)
        deeper: Tensor = self.down(hidden)
        deeper += mixed
        return deeper


class Model(nn.Module):
    def __init__(self, attention: type[nn.Module], *, crosses: bool = False) -> None:
        super().__init__()
        self.tokens = ScaledEmbedding(ROWS, WIDTH, padding_idx=ROWS - 1)
        self.blocks = nn.ModuleList([Block(attention()) for _ in range(2)])
        self.head = nn.Linear(WIDTH, ROWS)
        self.crosses = crosses

    def forward(self, tokens: Tensor) -> Tensor:
        x = embedded = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, embedded) if self.crosses else block(x)
        logits: Tensor = self.head(x)
        logits /= 2
        return logits


PLAN = {
    "tokens": "vocab",
    "blocks.*.attention.[qkv]*": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "colwise_gather",
}


def case_difference(attention: type[nn.Module], crosses: bool, options: dict[str, Any]) -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(attention, crosses=crosses).double()
    tokens = torch.randint(ROWS, (3, 6))
    tokens[:, 0] = ROWS - 1

    def loss_of(net: nn.Module) -> Tensor:
        return F.cross_entropy(net(tokens).flatten(0, 1), tokens.roll(1, dims=1).flatten())

    return largest_difference(model, resolve_plan(model, PLAN), loss_of, **options)


@pytest.mark.some("FusedAttention-tensor", "FusedAttention-sequence")
@pytest.mark.parametrize("cut", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("attention", [Attention, FusedAttention])
def test_odd_layers_do_what_they_do_alone(
    attention: type[nn.Module], cut: bool, workers: WorkerPool
) -> None:
    options = {"sequence_parallel": cut}
    assert max(workers.run(2, case_difference, attention, False, options)) < TOLERANCE


def test_two_activations_of_one_attention_both_get_their_gradient(workers: WorkerPool) -> None:
    assert max(workers.run(2, case_difference, Attention, True, {})) < TOLERANCE


def case_refused(attention: type[nn.Module], crosses: bool, plan: dict[str, str]) -> str:
    dist.init_process_group("gloo")
    dist.barrier()  # else one rank may end while the other still connects
    model = Model(attention, crosses=crosses)
    styles = resolve_plan(model, plan)
    tokens = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(ValueError) as error:  # noqa: PT011
        largest_difference(model, styles, lambda net: net(tokens).sum(), sequence_parallel=True)
    return str(error.value)


def test_a_second_activation_cannot_be_cut(workers: WorkerPool) -> None:
    for message in workers.run(2, case_refused, Attention, True, PLAN):
        assert "called with a second tensor that has a gradient" in message


def test_a_layer_that_may_need_the_whole_sequence_must_be_spread(workers: WorkerPool) -> None:
    plan = {pattern: style for pattern, style in PLAN.items() if "attention" not in pattern}
    for message in workers.run(2, case_refused, Attention, False, plan):
        assert "'blocks.0.attention.out' is not sharded and may look at all of it" in message


def case_padded_evaluation() -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, batch_first=True)
    alone = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    model = deepcopy(alone)
    styles = find_plan(model).styles
    TensorParallelModule(model, styles, init_device_mesh("cpu", (2,)))
    x, is_padding = torch.randn(2, 4, WIDTH), torch.zeros(2, 4, dtype=torch.bool)
    is_padding[:, -1] = True
    with torch.no_grad():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, about the nested tensors of this one
            expected = alone(x, src_key_padding_mask=is_padding)
        actual = model(x, src_key_padding_mask=is_padding)
    return float((actual - expected)[:, :-1].abs().max())


def test_torch_s_encoder_evaluates_padded_sequences(workers: WorkerPool) -> None:
    assert max(workers.run(2, case_padded_evaluation)) < 1e-5


class Listed(nn.Module):
    """Holds the layers of its MLP in a dictionary, which never runs; reads a learned activation."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ROWS, WIDTH)
        self.queries = nn.Parameter(torch.randn(4, WIDTH))
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 24), "down": nn.Linear(24, WIDTH)})

    def forward(self, tokens: Tensor) -> Tensor:
        mixed: Tensor = self.mlp["down"](self.mlp["up"](self.queries).relu())
        return self.tokens(tokens) + mixed.sum(0)


def case_listed() -> float:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(ROWS, (3, 6))

    def loss_of(net: nn.Module) -> Tensor:
        with torch.no_grad():
            net(tokens)  # as a validation does
        return net(tokens).square().mean()

    plan = {"mlp.up": "colwise", "mlp.down": "rowwise"}
    model = Listed().double()
    return largest_difference(model, resolve_plan(model, plan), loss_of)


def test_what_a_validation_has_let_in_is_not_trained_with(workers: WorkerPool) -> None:
    assert max(workers.run(2, case_listed)) < TOLERANCE


def case_unknown_token(token: int) -> str:
    dist.init_process_group("gloo")
    dist.barrier()  # else one rank may end while the other still connects
    model, mesh = Model(Attention), init_device_mesh("cpu", (2,))
    TensorParallelModule(model, resolve_plan(model, {"tokens": "vocab"}), mesh)
    with pytest.raises(IndexError) as error:
        model.tokens(torch.tensor([[0, ROWS - 1, token]]))
    return str(error.value)


@pytest.mark.parametrize("token", [-1, ROWS])
def test_an_unknown_token_is_no_zero(workers: WorkerPool, token: int) -> None:
    assert workers.run(2, case_unknown_token, token) == ["index out of range in self"] * 2
