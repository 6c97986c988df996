"""Models that are no sequence on two ranks, in one process, beside themselves alone."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.split import PipelineSplit, find_split
from tests.helpers.processes.threads import connect_turns

Loss = Callable[[nn.Module, Any], Tensor]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train_alone(model: nn.Module, batches: Sequence[Any], loss_of: Loss) -> list[float]:
    optimizer = optimizer_of(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def train_rank(
    holder: nn.Module,
    split: PipelineSplit,
    rank: int,
    links: Links,
    schedule: str,
    batches: Sequence[Any],
    loss_of: Loss,
) -> list[float]:
    """Trains one rank's part of ``holder.model``; gives the losses where the last stage is."""
    counts = split.layers_per_stage
    shape = PipelineShape(schedule, 2, counts, rank, len(counts) // 2)
    pipeline = Pipeline(split.layers, shape, links, rank=rank)
    optimizer = optimizer_of(holder)
    losses = []

    def step(microbatch: Any) -> Tensor:
        return loss_of(holder.model, microbatch.content)

    try:
        for batch in batches:
            results = pipeline.train_batch(batch, step)
            optimizer.zero_grad()
            pipeline.install_gradients()
            with pipeline.updating():
                optimizer.step()
            losses.append(sum(float(r.detach()) for r in results) / 2)
    finally:
        pipeline.close()
    return losses


def largest_difference(
    model: nn.Module, batches: Sequence[Any], loss_of: Loss, config: PipelineConfig
) -> float:
    """Trains a model alone and on two ranks; compares losses and weights; nan if there is one."""
    holders = [nn.ModuleDict({"model": copy.deepcopy(model)}) for _ in range(2)]
    splits = [find_split(holder, config, 2, rank) for rank, holder in enumerate(holders)]
    losses: dict[int, list[float]] = {}
    errors: list[BaseException] = []
    turn = threading.Lock()
    ends = connect_turns(config.rank_of_stage(2), turn)

    def run(rank: int) -> None:
        try:
            with turn:
                losses[rank] = train_rank(
                    holders[rank], splits[rank], rank, ends[rank], config.schedule, batches, loss_of
                )
        except BaseException as error:
            errors.append(error)
            ends[1 - rank].interrupt(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    expected = train_alone(model, batches, loss_of)
    wanted = dict(model.named_parameters())
    actual = {n: p for h in holders for n, p in h.model.named_parameters()}
    assert actual.keys() == wanted.keys()
    differences = [float((actual[n] - wanted[n]).detach().abs().max()) for n in wanted]
    where = config.rank_of_stage(2)[-1]
    differences += [abs(a - b) for a, b in zip(losses[where], expected, strict=True)]
    return float(torch.tensor(differences, dtype=torch.float64).max())  # nan if one is
