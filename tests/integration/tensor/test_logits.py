"""Whatever a step does with logits that each rank has a part of, it gets what the whole gives."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.checkpoint import checkpoint

from lightning_dist.engine.tensor_parallel.apply import TensorParallelModule
from lightning_dist.engine.tensor_parallel.layers import sharded_logits as logits_module
from lightning_dist.engine.tensor_parallel.layers.sharded_logits import ShardedLogits, joined
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensors.dtensor import whole
from tests.helpers.processes.workers import WorkerPool

ROWS, WIDTH, LENGTH = 12, 6, 5
CLASS_WEIGHTS = torch.linspace(0.5, 2.0, ROWS, dtype=torch.float64)
Step = Callable[[Tensor, Tensor], Tensor]


def flat(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return logits.view(-1, ROWS), y.flatten()


def shifted(logits: Tensor, y: Tensor) -> Tensor:
    y = y.masked_fill(y == 3, -100)
    return F.cross_entropy(logits[:, :-1].float().double().transpose(1, 2), y[:, 1:])


def written(write: Callable[[Tensor], Any]) -> Step:
    def step(logits: Tensor, y: Tensor) -> Tensor:
        write(logits)
        return F.cross_entropy(*flat(logits, y)) + logits.logsumexp(-1).square().mean()

    return step


def numbers(logits: Tensor, y: Tensor) -> Tensor:
    """Counts what Python is told of the logits as much as what autograd is."""
    told = logits.mean().item() + float(logits.detach().max()) + logits[0, 0].tolist()[-1]
    return F.cross_entropy(*flat(logits, y)) * (told + logits.norm().item())


def listed(logits: Tensor, y: Tensor) -> Tensor:
    """Counts what a list has of the logits."""
    return F.cross_entropy(*flat(logits, y)) * sum(logits[0, 0].tolist())


def dropped(logits: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(3)
    return F.cross_entropy(F.dropout(logits.view(-1, ROWS), 0.5), y.flatten())


def penalised(logits: Tensor, y: Tensor) -> Tensor:
    """Differentiates inside of the step."""
    loss = F.cross_entropy(*flat(logits, y))
    (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return loss + slope.square().sum()


def first_columns(logits: Tensor) -> None:
    logits[..., :5] = -3.0


FLAT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "scaled": lambda x, y: F.cross_entropy(torch.tanh(x / 2.0) * 2.0, y),
    "likelihood": lambda x, y: F.nll_loss(F.log_softmax(x, -1), y),
    "gathered": lambda x, y: -x.log_softmax(-1).gather(-1, y[:, None]).mean(),
    "distilled": lambda x, y: F.kl_div(
        x.log_softmax(-1), x.detach().roll(1, -1).softmax(-1), reduction="batchmean"
    ),
    "smoothed": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "class weights": lambda x, y: F.cross_entropy(x, y, CLASS_WEIGHTS),
    "class weights and ignored": lambda x, y: F.cross_entropy(
        x, y.masked_fill(y == 3, -100), weight=CLASS_WEIGHTS
    ),
    "class weights of a module": lambda x, y: nn.CrossEntropyLoss(CLASS_WEIGHTS, ignore_index=3)(
        x, y
    ),
    "likelihood of weighted classes": lambda x, y: nn.NLLLoss(CLASS_WEIGHTS, ignore_index=3)(
        F.log_softmax(x, -1), y
    ),
    "soft targets": lambda x, y: F.cross_entropy(x, F.one_hot(y, ROWS).to(x.dtype)),
    "two halves": lambda x, y: F.cross_entropy(x.view(-1, 2, ROWS // 2)[:, 0], y % 6),
    "thirds": lambda x, y: F.cross_entropy(
        x.view(-1, 3, ROWS // 3).transpose(1, 2), y.view(-1, 1).expand(-1, 3) % 4
    ),
    "some columns": lambda x, y: F.cross_entropy(x[:, [1, 7, 3]], y % 3),
}
STEPS: dict[str, Step] = {
    **{name: lambda x, y, use=use: use(*flat(x, y)) for name, use in FLAT.items()},  # type: ignore[misc]
    "shifted": shifted,
    "numbers": numbers,
    "listed": listed,
    "dropped": dropped,
    "penalised": penalised,
    "divided in place": written(lambda x: x.div_(2.0)),
    "masked in place": written(lambda x: x.masked_fill_(torch.arange(ROWS) % 3 == 0, -9.0)),
    "assigned": written(first_columns),
}


APART = {"cross-entropy", "scaled", "shifted"}
"""Of these the whole logits exist nowhere."""


def models() -> tuple[nn.Sequential, nn.Sequential, ShardedLogits]:
    """Returns a model, the same over two ranks, and the mode for its steps."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)).double()
    together = deepcopy(alone)
    styles = {"0": Style.VOCAB, "1": Style.COLWISE_GATHER}
    logits = TensorParallelModule(together, styles, mesh, loss_parallel=True).logits
    assert logits is not None
    return alone, together, logits


def recomputed_differences() -> list[float]:
    """Runs head and loss in a checkpoint, whose backward runs them again."""
    alone, together, logits = models()
    x, y = torch.randint(ROWS, (2, 3, LENGTH))
    found = []
    for name in ("cross-entropy", "scaled", "smoothed"):

        def head_and_loss(model: nn.Sequential, hidden: Tensor, name: str = name) -> Tensor:
            return STEPS[name](model[1](hidden), y)

        expected = _slopes(alone, head_and_loss(alone, alone[0](x)))
        with logits:
            hidden = together[0](x)
            loss = joined(checkpoint(head_and_loss, together, hidden, use_reentrant=False))
        with loss_parallel():
            actual = _slopes(together, loss)
        pairs = zip(expected, actual, strict=True)
        found.append(max(float((a - b).abs().max()) for a, b in pairs))
    return found


def test_a_checkpoint_may_hold_head_and_loss(workers: WorkerPool) -> None:
    for found in workers.run(2, recomputed_differences):
        assert max(found) < 1e-12


def differences() -> tuple[dict[str, float], set[str]]:
    """Takes each step's loss and gradients alone and sharded.

    Gives the largest difference of each, and those that have joined the logits.
    """
    alone, together, logits = models()
    x, y = torch.randint(ROWS, (2, 3, LENGTH))
    assert type(together(x)) is Tensor, "outside of a step nobody knows what to do with parts"
    found, joins = {}, set()
    join = logits_module.whole

    def noticed(tensor: Tensor) -> Tensor:
        if tensor.dim():  # the loss is joined, too
            joins.add(name)
        return join(tensor)

    for name, step in STEPS.items():
        expected = _slopes(alone, step(alone(x), y))
        with logits, pytest.MonkeyPatch.context() as patch:
            patch.setattr(logits_module, "whole", noticed)
            loss = joined(step(together(x), y))
        with loss_parallel():
            actual = _slopes(together, loss)
        pairs = zip(expected, actual, strict=True)
        found[name] = max(float((a - b).abs().max()) for a, b in pairs)
    return found, joins


def _slopes(model: nn.Module, loss: Tensor) -> list[Tensor]:
    assert type(loss) is Tensor
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return [loss.detach(), *map(whole, gradients)]


def test_a_step_may_do_with_logits_what_it_likes(workers: WorkerPool) -> None:
    for found, joins in workers.run(2, differences):
        assert joins == STEPS.keys() - APART
        assert found.keys() == STEPS.keys()
        assert {name: value for name, value in found.items() if not value < 1e-12} == {}
