"""Hosts that cannot meet: each rank says why, with what to change, within seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from lightning_dist import DDPStrategy
from tests.helpers.hosts.cluster import Cluster, hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.integration.hosts.common import Unlogged

pytestmark = [
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.long,  # seconds of waiting; the units are tested in milliseconds
]

EARLY_SECONDS = 30.0


def refused(environments: list[Mapping[str, str]], timeout_s: float) -> str:
    """Trains in vain; returns the error."""
    os.environ.update(environments[int(os.environ["RANK"])])
    begin = time.monotonic()
    trainer = make_trainer(num_nodes=2, devices=1, strategy=DDPStrategy(timeout_s=timeout_s))
    with pytest.raises((ValueError, TimeoutError)) as caught:
        trainer.fit(make_module(Unlogged), make_loader(8))
    assert time.monotonic() < begin + EARLY_SECONDS
    return str(caught.value)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with hosts(2) as made:
        yield made


def errors_on(cluster: Cluster, *environments: Mapping[str, str], timeout_s: float = 300) -> Any:
    workers = HostWorkers(cluster)
    try:
        return workers.run_on([0, 1], refused, environments or ({}, {}), timeout_s)
    finally:
        workers.close()


def test_a_host_that_cannot_be_reached_is_named_on_both(cluster: Cluster) -> None:
    cluster.hosts[1].cut()
    first, second = errors_on(cluster, timeout_s=10)
    assert "1 of 2 ranks have met; missing: 1 (host number 1, of which no rank came)" in first
    assert "MASTER_ADDR=10.231.7.1, MASTER_PORT=29500 does not answer" in second


def test_an_address_that_does_not_answer_is_given_up_early(cluster: Cluster) -> None:
    """Long before ``timeout_s``: the address is a third host's, which is not there."""
    elsewhere = {"MASTER_ADDR": "10.231.7.9"}
    first, second = errors_on(cluster, elsewhere, elsewhere)
    assert "host host0, and cannot reach it at MASTER_ADDR=10.231.7.9" in first
    assert "10.231.7.9" in second
    assert "MASTER_ADDR" in second


def test_two_hosts_of_one_number_are_named_on_both(cluster: Cluster) -> None:
    zero = {"NODE_RANK": "0"}
    first, second = errors_on(cluster, zero, zero)
    assert first == second
    assert "Two processes are rank 0, on the hosts host0 and host1" in first


def test_a_port_that_is_taken_is_told_on_both(cluster: Cluster) -> None:
    server = cluster.hosts[0].popen(["python3", "-m", "http.server", "29500"])
    time.sleep(1.0)
    first, second = errors_on(cluster)
    server.kill()
    server.wait()
    assert "MASTER_PORT=29500 is taken by another process on host host0" in first
    assert "MASTER_PORT=29500 is no run's first rank" in second
