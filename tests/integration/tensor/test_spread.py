"""A model sharded over tensor-parallel ranks computes what it computes alone."""

from __future__ import annotations

import copy
from collections import Counter
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

from lightning_dist.engine.tensor_parallel.apply import (
    TensorParallelModule,
    check_not_sharded,
)
from lightning_dist.engine.tensor_parallel.config import resolve_plan
from lightning_dist.engine.tensor_parallel.layers.activations import all_reduce_gradients
from lightning_dist.engine.tensors.dtensor import local_part, whole
from lightning_dist.engine.tensors.patch import user_state_kept
from recipes.gpt import Attention, build_gpt
from tests.helpers.processes.workers import WorkerPool

DEPTH = 2
PLAN = {
    "0.token": "vocab",
    "*.attention.qkv": "colwise",
    "*.attention.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
    f"{DEPTH + 1}.logits": "colwise_gather",
}


def ranks() -> DeviceMesh:
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def gpt(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    return build_gpt(width=32, depth=DEPTH, **options).double()


def tokens(seed: int = 1) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(256, (2, 3, 8), generator=torch.Generator().manual_seed(seed))
    return drawn[0], drawn[1]


def loss_of(network: nn.Module) -> Tensor:
    inputs, targets = tokens()
    return F.cross_entropy(network(inputs).flatten(0, 1), targets.flatten())


def differences(sequence_parallel: bool) -> list[float]:
    alone, together = gpt(), gpt()
    sharded = TensorParallelModule(
        together, resolve_plan(together, PLAN), ranks(), sequence_parallel=sequence_parallel
    )
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (alone, together)]
    found = []
    for _ in range(3):
        losses = [loss_of(alone), loss_of(together)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        sharded.add_gradients()
        pairs = list(zip(together.parameters(), alone.parameters(), strict=True))
        found += [float((whole(a.grad) - b.grad).abs().max()) for a, b in pairs]
        found.append(abs(losses[0].item() - losses[1].item()))
        for optimizer in optimizers:
            optimizer.step()
        found += [float((whole(a.detach()) - b.detach()).abs().max()) for a, b in pairs]
    return found


@pytest.mark.some("False-2")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_equals_the_whole_model(workers: WorkerPool, size: int, sequence_parallel: bool) -> None:
    for found in workers.run(size, differences, sequence_parallel):
        assert max(found) < 1e-12


def refusal_to_copy() -> str:
    network = gpt()
    TensorParallelModule(network, resolve_plan(network, PLAN), ranks())
    try:
        copy.deepcopy(network)
    except ValueError as error:
        return str(error)
    return ""


def test_a_copy_would_compute_with_the_original_s_weights(workers: WorkerPool) -> None:
    for text in workers.run(2, refusal_to_copy):
        assert "cannot be copied" in text
        assert "ShardedWeightAveraging" in text


def zeroed(gradient: Tensor) -> Tensor:
    return gradient * 0


def counted(parameter: Any) -> None:
    parameter.rate += 1


def kept_on_a_parameter() -> tuple[int, float, str]:
    network = gpt()
    weight = network.get_parameter("1.attention.qkv.weight")
    weight.rate = 3  # type: ignore[attr-defined]
    handle = weight.register_hook(zeroed)
    weight.register_post_accumulate_grad_hook(counted)
    sharded = TensorParallelModule(network, resolve_plan(network, PLAN), ranks())
    with user_state_kept(network):
        network.to("cpu")  # torch swaps the parameters for others
    part: Any = network.get_parameter("1.attention.qkv.weight")
    loss_of(network).backward()
    zero = float(local_part(part.grad).abs().max())
    handle.remove()
    loss_of(network).backward()
    assert float(local_part(part.grad).abs().max()) > 0, "its handle is good"
    try:
        check_not_sharded(sharded.module)
    except ValueError as error:
        return part.rate, zero, str(error)
    return part.rate, zero, ""


def test_what_users_put_on_parameters_stays_and_nothing_is_spread_twice(
    workers: WorkerPool,
) -> None:
    for rate, zero, text in workers.run(2, kept_on_a_parameter):
        assert (rate, zero) == (3 + 2, 0.0)
        assert "is sharded over ranks already" in text


def summed_where_there_are_some() -> list[Any]:
    mesh = ranks()
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(4)]
    for number in (0, 1 + rank):  # one on both, one on each, one on none
        parameters[number].grad = torch.full((2,), 10.0 * number + rank)
    all_reduce_gradients(parameters, mesh)
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_a_gradient_of_some_ranks_is_everybody_s(workers: WorkerPool) -> None:
    for found in workers.run(2, summed_where_there_are_some):
        assert found == [[1.0, 1.0], [10.0, 10.0], [21.0, 21.0], None]


def width_refusals() -> list[str]:
    mesh, texts = ranks(), []
    for plan in (
        {"*.up": "rowwise", "*.down": "colwise"},
        {"*.up": "colwise", "*.down": "colwise"},
    ):
        network = gpt()
        TensorParallelModule(network, resolve_plan(network, plan), mesh)
        with pytest.raises(ValueError, match="by the plan") as caught:
            loss_of(network)
        texts.append(str(caught.value))
    return texts


def test_layers_that_are_given_other_widths_than_by_the_plan(workers: WorkerPool) -> None:
    for swapped, twice in workers.run(2, width_refusals):
        assert "'1.up' takes each rank's own features, 16 of them, but it is given 32" in swapped
        assert "'1.down' takes what all ranks have, 128 of them, but it is given 64" in twice


def held_elements() -> tuple[int, int]:
    network = gpt()
    TensorParallelModule(network, resolve_plan(network, PLAN), ranks())
    own = sum(local_part(p).numel() for p in network.parameters())
    return own, sum(p.numel() for p in network.parameters())


def test_a_rank_holds_its_share(workers: WorkerPool) -> None:
    norms = (2 * DEPTH + 1) * 32
    for own, total in workers.run(2, held_elements):
        assert own - norms == (total - norms) / 2


class PlainBlock(nn.Module):
    """A block that calls each module once: torch's counter loses count of one called twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = Attention(width, num_heads=4)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def collectives(sequence_parallel: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Counts those of all blocks together, forward and backward."""
    network = nn.Sequential(*(PlainBlock() for _ in range(DEPTH)))
    plan = {pattern: style for pattern, style in PLAN.items() if pattern.startswith("*")}
    TensorParallelModule(
        network, resolve_plan(network, plan), ranks(), sequence_parallel=sequence_parallel
    )
    counts = []
    activation = torch.randn(3, 8, 16, requires_grad=True)
    with CommDebugMode() as forward:
        loss = network(activation).sum()
    counts.append({str(op): n for op, n in forward.get_comm_counts().items()})
    with CommDebugMode() as backward:
        loss.backward()
    counts.append({str(op): n for op, n in backward.get_comm_counts().items()})
    return counts[0], counts[1]


def by_kind(counts: dict[str, int]) -> Counter[str]:
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    return Counter({kind: n for kind in kinds for op, n in counts.items() if kind in op})


def test_two_all_reduces_for_each_block_and_direction(workers: WorkerPool) -> None:
    for forward, backward in workers.run(2, collectives, False):
        assert by_kind(forward) == {"all_reduce": 2 * DEPTH}
        assert by_kind(backward) == {"all_reduce": 2 * DEPTH}


def test_sequence_parallelism_takes_no_more_traffic(workers: WorkerPool) -> None:
    """An all-reduce is a reduce-scatter and an all-gather; and one more to join, one to cut."""
    for forward, backward in workers.run(2, collectives, True):
        assert by_kind(forward) == {"reduce_scatter": 2 * DEPTH, "all_gather": 2 * DEPTH + 1}
        assert by_kind(backward) == {"reduce_scatter": 2 * DEPTH, "all_gather": 2 * DEPTH + 1}


class Noisy(nn.Module):
    """Drops inside of a region, behind it, and draws in a block of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 64, bias=False)
        self.down = nn.Linear(64, 8, bias=False)
        self.inside: Tensor | None = None
        self.outside: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.inside = F.dropout(torch.ones_like(self.up(x)), 0.5, self.training)
        summed = self.down(self.up(x) * self.inside)
        self.outside = F.dropout(torch.ones_like(summed), 0.5, self.training)
        return x + summed * self.outside


def masks(sequence_parallel: bool, seed: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    network = nn.Sequential(Noisy(), Noisy())
    TensorParallelModule(
        network,
        resolve_plan(network, {"*.up": "colwise", "*.down": "rowwise"}),
        ranks(),
        sequence_parallel=sequence_parallel,
    )
    torch.manual_seed(seed)
    network(torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(5)))
    return [(block.inside, block.outside) for block in network] + [torch.get_rng_state()]


def test_dropout_differs_inside_of_a_region_only(workers: WorkerPool) -> None:
    *first, state = workers.run(2, masks, False, 1)[0]
    *second, other_state = workers.run(2, masks, False, 1)[1]
    for (inside, outside), (other_inside, other_outside) in zip(first, second, strict=True):
        assert not torch.equal(inside, other_inside)
        assert torch.equal(outside, other_outside)
        assert 0.4 < float((inside == 0).double().mean()) < 0.6
    assert torch.equal(state, other_state)
    again = workers.run(2, masks, False, 1)[0][0]
    assert torch.equal(again[0], first[0][0]), "the same seed draws the same"
    other = workers.run(2, masks, False, 2)[0][0]
    assert not torch.equal(other[0], first[0][0])


def test_dropout_differs_between_parts_of_the_sequence(workers: WorkerPool) -> None:
    one, other = workers.run(2, masks, True, 1)
    for (_, outside), (_, other_outside) in zip(one[:-1], other[:-1], strict=True):
        assert outside.shape == (3, 4, 8)
        assert not torch.equal(outside, other_outside)
    assert torch.equal(one[-1], other[-1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(x))))


def tied_difference() -> tuple[float, bool]:
    torch.manual_seed(0)
    alone = Tied().double()
    together = deepcopy(alone)
    styles = resolve_plan(together, {"embedding": "vocab", "head": "colwise_gather"})
    TensorParallelModule(together, styles, ranks())
    x = torch.arange(16).view(2, 8)
    for network in (alone, together):
        network(x).square().sum().backward()
    gradient = together.embedding.weight.grad
    assert gradient is not None
    difference = (whole(gradient) - alone.embedding.weight.grad).abs().max()
    return float(difference), together.head.weight is together.embedding.weight


def test_a_tied_parameter_stays_one(workers: WorkerPool) -> None:
    for difference, is_one in workers.run(2, tied_difference):
        assert difference < 1e-12
        assert is_one


def refusal(plan: dict[str, str], heads: int, length: int, sequence_parallel: bool) -> str:
    network = gpt(num_heads=heads)
    mesh = ranks()
    dist.barrier()  # else one rank may end while the other still connects

    def spread_and_call() -> None:
        TensorParallelModule(
            network, resolve_plan(network, plan), mesh, sequence_parallel=sequence_parallel
        )
        network(torch.zeros(1, length, dtype=torch.int64))

    with pytest.raises(ValueError, match=r".") as caught:
        spread_and_call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("plan", "heads", "length", "sequence_parallel", "words"),
    [
        (PLAN, 1, 8, False, ["num_heads=1", "1.attention", "tp_size=2", "[1]"]),
        (PLAN, 4, 7, True, ["sequence of 7", "tp_size=2", "8"]),
        ({"1.mlp_norm": "sequence"}, 4, 8, False, ["'1.mlp_norm'", "sequence_parallel=True"]),
    ],
)
def test_what_cannot_be_shared_out_is_refused(
    workers: WorkerPool,
    plan: dict[str, str],
    heads: int,
    length: int,
    sequence_parallel: bool,
    words: list[str],
) -> None:
    first, second = workers.run(2, refusal, plan, heads, length, sequence_parallel)
    assert first == second
    for word in words:
        assert word in first
