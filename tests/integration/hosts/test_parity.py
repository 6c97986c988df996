"""Each strategy on two hosts equals one device, and goes on on another number of hosts."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_dist.engine.planning.partition import uniform_partition
from tests.helpers.hosts.cluster import Cluster, Network, hosts
from tests.helpers.hosts.namespaces import why_no_hosts, why_no_lossy_cable
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.networks.models import make_data, make_module, make_optimizer
from tests.helpers.oracle import train_late, train_sequentially
from tests.integration.hosts.common import DEPTH, GLOBAL_BATCH, NUM_SAMPLES, STRATEGIES, train

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

TOLERANCE = 1e-12
ROUTES = {
    "2 hosts x 1": [[0, 1], [0, 0], [0, 1]],
    "2 hosts x 2": [[0, 0, 1, 1], [1, 1], [0, 0, 1, 1]],
}
"""The hosts of the ranks in each epoch: two hosts, then one, then two again."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hosts(2, shared_disk=True) as cluster:
        yield cluster


def on_one_device(strategy: str, stages: Sequence[int]) -> list[dict[str, Tensor]]:
    """Returns the weights after each epoch, which has so many stages if it has stages at all."""
    if strategy == "pipedream":
        return pipedream(tuple(stages))
    return late() if strategy == "pipedream_2bw" else plain()


def batches() -> list[list[Tensor]]:
    return list(DataLoader(make_data(NUM_SAMPLES), GLOBAL_BATCH))


def weights(layers: nn.Module) -> dict[str, Tensor]:
    return {f"model.{n}": p.detach().clone() for n, p in layers.named_parameters()}


@cache
def plain() -> list[dict[str, Tensor]]:
    model = make_module(depth=DEPTH).model
    optimizer = make_optimizer("sgd", model.parameters())
    found = []
    for _ in range(3):
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        found.append(weights(model))
    return found


@cache
def late() -> list[dict[str, Tensor]]:
    model = make_module(depth=DEPTH).model
    optimizer = make_optimizer("sgd", model.parameters())
    found = []
    for _ in range(3):
        train_late(model, optimizer, batches(), F.cross_entropy, drains=())
        found.append(weights(model))
    return found


@cache
def pipedream(stages: tuple[int, ...]) -> list[dict[str, Tensor]]:
    model = make_module(depth=DEPTH).model
    optimizers = {
        layer: make_optimizer("sgd", layer.parameters())
        for layer in model
        if list(layer.parameters())
    }
    found = []
    for count in stages:
        layers, parts = list(model), []
        for size in uniform_partition(len(layers), count):
            parts.append(nn.Sequential(*layers[:size]))
            layers = layers[size:]

        def step(stage: int, _: int, parts: list[nn.Sequential] = parts) -> None:
            for layer in parts[stage]:
                if layer in optimizers:
                    optimizers[layer].step()

        of_stages = [make_optimizer("sgd", part.parameters()) for part in parts]
        train_sequentially(parts, of_stages, batches(), F.cross_entropy, (), "stash", step=step)
        found.append(weights(model))
    return found


def apart(ranks: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> float:
    """Returns the largest difference of a rank's weight."""
    assert {name for rank in ranks for name in rank} == expected.keys()
    return max(float((v - expected[n]).abs().max()) for rank in ranks for n, v in rank.items())


@pytest.mark.some("2 hosts x 1-pipedream")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("route", ROUTES)
def test_equals_one_device_on_two_hosts_then_one_then_two(
    host_workers: HostWorkers, cluster: Cluster, route: str, strategy: str
) -> None:
    expected = on_one_device(strategy, [len(ranks) for ranks in ROUTES[route]])
    resume = None
    for epoch, ranks in enumerate(ROUTES[route]):
        nodes = len(set(ranks))
        save = str(cluster.disk / f"{route}, {strategy}, {epoch}.ckpt")
        shape = (nodes, len(ranks) // nodes)
        found = host_workers.run_on(ranks, train, strategy, *shape, epoch + 1, resume, save)
        assert apart(found, expected[epoch]) < TOLERANCE
        resume = save


@pytest.mark.long
@pytest.mark.skipif(why_no_lossy_cable() is not None, reason=str(why_no_lossy_cable()))
def test_equals_one_device_where_packets_are_late_and_lost() -> None:
    network = Network(delay_seconds=0.005, loss=0.01)
    with hosts(2, networks=[network], shared_disk=True) as cluster:
        workers = HostWorkers(cluster)
        try:
            for strategy in STRATEGIES:
                save = str(cluster.disk / f"{strategy}.ckpt")
                found = workers.run_on([0, 1], train, strategy, 2, 1, 1, None, save)
                assert apart(found, on_one_device(strategy, [2])[0]) < TOLERANCE
        finally:
            workers.close()


@pytest.mark.long
@pytest.mark.parametrize("per_host", [1, 2])
def test_torchrun_starts_them_on_two_hosts(cluster: Cluster, per_host: int) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={per_host}"]
    launch += ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={cluster.hosts[0].name}"]
    script = ["-m", "tests.integration.hosts.train_each", str(cluster.disk), *STRATEGIES]
    cluster.run([[*launch, *script]] * 2, env={"PYTHONWARNINGS": "ignore"}, timeout=250.0)
    world_size = 2 * per_host
    for strategy in STRATEGIES:
        files = [cluster.disk / f"{strategy}, {rank}.pt" for rank in range(world_size)]
        found = [torch.load(cluster.hosts[0].path(file)) for file in files]
        assert apart(found, on_one_device(strategy, [world_size])[0]) < TOLERANCE


@pytest.mark.parametrize("stages", [2, 4])
def test_the_references_differ(stages: int) -> None:
    one, other, third = plain()[0], late()[0], pipedream((stages,))[0]
    assert min(apart([one], other), apart([one], third), apart([other], third)) > 1e-6
    assert apart([third], pipedream((6 - stages,))[0]) > 1e-6
