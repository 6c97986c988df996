from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.connect import connect_in_memory
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.split import find_split

BATCH = torch.ones(4, 2)


def make(schedule: str) -> tuple[Pipeline, Any]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    links = connect_in_memory(range(1))[0]

    def step(microbatch: Any) -> Tensor:
        return model(microbatch.content).square().mean()

    return Pipeline(model, PipelineShape(schedule, 1, (2,), 0), links), step


def take(pipeline: Pipeline) -> None:
    pipeline.install_gradients()
    with pipeline.updating():
        pass


def test_an_asynchronous_update_that_is_left_out_is_an_error() -> None:
    pipeline, step = make("pipedream_2bw")
    for _ in range(3):
        pipeline.train_batch(BATCH, step)
        if pipeline.has_gradients:
            take(pipeline)
    drain = pipeline.drain()
    next(drain)
    with pytest.raises(ValueError, match="the update of batch 2 was not taken"):
        next(drain)
    with pytest.raises(ValueError, match="the update of batch 2 was not taken"):
        pipeline.train_batch(BATCH, step)
    take(pipeline)


def test_a_synchronous_update_may_take_several_batches() -> None:
    pipeline, step = make("1f1b")
    for _ in range(2):
        pipeline.train_batch(BATCH, step)
    take(pipeline)
    assert list(pipeline.drain()) == []


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_copies_of_a_parameter_that_nothing_keeps_equal_are_an_error(schedule: str) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        model[2].weight = model[0].weight
        return model

    links = connect_in_memory(range(2))
    for rank, name in enumerate(("0.weight", "2.weight")):
        shape = PipelineShape(schedule, 1, (2, 1), rank)
        model = tied()
        with pytest.raises(ValueError, match=r"'0.weight' .stage 0. and '2.weight' .stage 1."):
            Pipeline(model, shape, links[rank])
        if shape.family.update_rule.is_joint:
            Pipeline(model, shape, links[rank], shared={name}).detach()
        else:
            with pytest.raises(ValueError, match="no rank could apply their sum"):
                Pipeline(model, shape, links[rank], shared={name})
    alone = PipelineShape(schedule, 1, (3,), 0)
    Pipeline(tied(), alone, connect_in_memory(range(1))[0]).detach()


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_head_beside_a_plain_sequence_is_an_error_unless_it_is_frozen(schedule: str) -> None:
    model, head = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 3)
    links = connect_in_memory(range(1))[0]
    pipeline = Pipeline(model, PipelineShape(schedule, 1, (1,), 0), links)

    def step(microbatch: Any) -> Tensor:
        return head(model(microbatch.content)).square().mean()

    with pytest.raises(ValueError, match=r"find_split.*a trainable parameter of shape \(3,"):
        pipeline.train_batch(BATCH, step)
    pipeline.clear()
    pipeline.detach()
    head.requires_grad_(False)
    pipeline = Pipeline(model, PipelineShape(schedule, 1, (1,), 0), links)
    pipeline.train_batch(BATCH, step)


def test_a_head_that_a_split_has_found_is_the_last_stages() -> None:
    users = nn.ModuleDict({"model": nn.Sequential(nn.Linear(2, 2)), "head": nn.Linear(2, 3)})
    split = find_split(users, PipelineConfig(layers="model"), 1, 0)
    links = connect_in_memory(range(1))[0]
    pipeline = Pipeline(split.layers, PipelineShape("1f1b", 2, (1,), 0), links)

    def loss(x: Tensor) -> Tensor:
        return users["head"](users["model"](x)).square().mean()

    pipeline.train_batch(BATCH, lambda microbatch: loss(microbatch.content))
    pipeline.install_gradients()
    (expected,) = torch.autograd.grad(loss(BATCH), [users["head"].weight])
    torch.testing.assert_close(users["head"].weight.grad, expected)


def test_messages_of_a_failed_batch_are_not_taken_for_those_of_the_next() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    links = connect_in_memory(range(2))
    pipeline = Pipeline(model, PipelineShape("1f1b", 1, (1, 1), 1), links[1])
    sent = torch.ones(4, 2, requires_grad=True)
    links[0].outgoing[0, 1].send(sent)
    pipeline.train_batch(BATCH, lambda m: model(m.content).sum())
    pipeline.clear(failed=False)
    assert not pipeline.has_gradients
    for _ in range(2):
        links[0].outgoing[0, 1].send(sent)

    def fail(microbatch: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pipeline.train_batch(BATCH, fail)
    pipeline.clear()
    with pytest.raises(ValueError, match=r"open new ones.*of the batch that has failed"):
        pipeline.train_batch(BATCH, lambda m: model(m.content).sum())


def test_a_batch_is_evaluated_without_gradients() -> None:
    pipeline, step = make("1f1b")
    (result,) = pipeline.evaluate_batch(BATCH, step, 1)
    assert not result.requires_grad
    assert torch.is_grad_enabled()


def test_a_cut_of_other_layers_is_an_error() -> None:
    model, links = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), connect_in_memory(range(1))[0]
    for cut, count in (((1,), 1), ((3,), 3)):
        with pytest.raises(ValueError, match=f"is a cut of {count} layers, and there are 2"):
            Pipeline(model, PipelineShape("1f1b", 1, cut, 0), links)


def test_channels_of_other_stages_are_an_error() -> None:
    model, links = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))), connect_in_memory(range(2))
    for rank, stages in ((0, "0, 3"), (1, "1, 2")):
        shape = PipelineShape("zbv", 4, (1, 1, 1, 1), rank, stages_per_rank=2)
        message = rf"`connect\(..., rank_of_stage=\[0, 1, 1, 0\]\)`.*has the stages \[{stages}\]"
        with pytest.raises(ValueError, match=message):
            Pipeline(model, shape, links[rank])
    assert len(model) == 4
    assert all(isinstance(layer, nn.Linear) for layer in model)
