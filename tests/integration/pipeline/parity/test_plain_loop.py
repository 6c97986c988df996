"""The pipeline without Lightning, in plain loops: over real processes and over plain queues."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.connect import connect
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.engine.schedules.update_rule import WeightVersions
from lightning_dist.engine.tensors.tree import flatten
from tests.helpers.networks.models import make_data, make_layers, make_optimizer
from tests.helpers.processes.threads import connect_turns
from tests.helpers.processes.workers import WorkerPool

PAGE = Path(__file__).parents[4] / "docs" / "api" / "pipeline.md"


def model() -> Any:
    torch.manual_seed(7)
    return make_layers().double()


def train(
    net: Any, rank: int, links: Links, schedule: str, num_microbatches: int, **options: Any
) -> dict[str, Any]:
    shape = PipelineShape(schedule, num_microbatches, (4, 4), rank)
    pipeline = Pipeline(net, shape, links, StageOptions(**options))
    optimizer = make_optimizer("sgd", net.parameters())

    def step(microbatch: Any) -> torch.Tensor:
        x, y = microbatch.content
        return F.cross_entropy(net(x), y)

    def update() -> None:
        optimizer.zero_grad()
        pipeline.install_gradients()
        with pipeline.updating():
            optimizer.step()

    for batch in torch.utils.data.DataLoader(make_data(30), batch_size=8):
        pipeline.train_batch(batch, step)
        if pipeline.has_gradients:
            update()
    for _ in pipeline.drain():
        update()
    pipeline.close()
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def single() -> dict[str, Any]:
    net = model()
    optimizer = make_optimizer("sgd", net.parameters())
    for x, y in torch.utils.data.DataLoader(make_data(30), batch_size=8):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    return dict(net.named_parameters())


def in_process(
    schedule: str, num_microbatches: int, versions: WeightVersions = "stash"
) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    channels = connect(MeshShape(pp=2).groups("pp"), torch.device("cpu"), 30.0)
    state = train(
        model(), rank, channels.links, schedule, num_microbatches, weight_versions=versions
    )
    channels.close()
    return state


def test_a_plain_loop_equals_a_single_device(workers: WorkerPool) -> None:
    first, second = workers.run(2, in_process, "1f1b", 3)
    for name, value in single().items():
        torch.testing.assert_close({**first, **second}[name], value, rtol=0, atol=1e-12)


def test_under_2bw_all_stages_have_the_same_version_anyway(workers: WorkerPool) -> None:
    stash = workers.run(2, in_process, "pipedream_2bw", 2)
    vertical = workers.run(2, in_process, "pipedream_2bw", 2, "vertical_sync")
    for left, right in zip(stash, vertical, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)


def run_script(script: str) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "2"  # as torchrun gives it
    names: dict[str, Any] = {}
    exec(script, names)
    return {name: p.detach() for name, p in names["model"].named_parameters()}


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream_2bw"])
def test_the_script_of_the_page_trains_as_one_device_does(
    workers: WorkerPool, schedule: str
) -> None:
    (script,) = re.findall(r"```python\n(.+?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    first, second = workers.run(2, run_script, script.replace("1f1b", schedule))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 4))
    weights = [dict(net.named_parameters())]
    delay = 1 if schedule == "pipedream_2bw" else 0
    for _ in range(10):
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        used = weights[max(0, len(weights) - 1 - delay)]
        loss = F.cross_entropy(torch.func.functional_call(net, used, (x,)), y)
        gradients = torch.autograd.grad(loss, [*used.values()])
        latest = zip(weights[-1].items(), gradients, strict=True)
        weights.append({n: (p - 0.1 * g).detach().requires_grad_() for (n, p), g in latest})
    torch.testing.assert_close({**first, **second}, weights[-1])


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_queues_in_one_process_do_the_same(workers: WorkerPool, schedule: str) -> None:
    count = 1 if schedule == "pipedream" else 3
    turn = threading.Lock()
    ends = connect_turns((0, 1), turn)
    states: dict[int, Any] = {}
    nets = [model(), model()]  # here, for the threads share one random generator

    def run(rank: int) -> None:
        with turn:
            states[rank] = train(nets[rank], rank, ends[rank], schedule, count)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    expected = workers.run(2, in_process, schedule, count)
    for rank in (0, 1):
        for name, value in states[rank].items():
            torch.testing.assert_close(value, expected[rank][name], rtol=0, atol=1e-12)


def exchange(messages: list[Any]) -> list[Any]:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if rank == 0:
        sender = DistributedSender(dist.group.WORLD, 1)
        for message in messages:
            sender.send(message)
        sender.close()
        return []
    receiver = DistributedReceiver(dist.group.WORLD, 0, torch.device("cpu"), 30.0)
    received = [receiver.receive() for _ in messages]
    receiver.close()
    return received


def test_messages_of_changing_shapes_arrive_as_sent(workers: WorkerPool) -> None:
    torch.manual_seed(0)
    messages: list[Any] = [
        {"x": torch.randn(3, 2), "note": "first"},
        {"x": torch.randn(3, 2), "note": "first"},
        {"x": torch.randn(5, 2), "note": "first"},
        (torch.arange(4), torch.ones(0, 3), None),
        torch.tensor(2.0, dtype=torch.bfloat16),
        [torch.randn(2, 3).t(), torch.tensor([True, False])],
        "no tensor at all",
        {"x": torch.randn(1, 2), "note": "last"},
    ]
    messages[0]["x"].requires_grad_()
    _, received = workers.run(2, exchange, messages)
    assert received[0]["x"].requires_grad
    assert not received[1]["x"].requires_grad
    for actual, sent in zip(received, messages, strict=True):
        left, skeleton = flatten(actual)
        right, wanted = flatten(sent)
        assert skeleton == wanted
        torch.testing.assert_close(left, right, rtol=0, atol=0)
