"""Hosts of several interfaces, or of IPv6 alone: what gloo takes, and what users see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest

from lightning_dist import DDPStrategy
from lightning_dist.engine.comms.interface import VARIABLE, choose_interface, interfaces
from tests.helpers.hosts.cluster import Cluster, Network, hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.integration.hosts.common import Unlogged

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

FIRST, SECOND = Network(), Network("eth1", ipv4="10.231.8")
IPV6 = Network(ipv4=None, ipv6="fd00:7:0:0")


def fit(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Trains; returns the interface that gloo was told to take, and the error with its notes."""
    os.environ.update(environment)
    os.environ.pop(VARIABLE, None) if VARIABLE not in environment else None
    trainer = make_trainer(num_nodes=2, devices=1, strategy=DDPStrategy(timeout_s=20))
    try:
        trainer.fit(make_module(Unlogged), make_loader(8))
    except RuntimeError as error:
        return os.environ.get(VARIABLE), "\n".join([str(error), *error.__notes__])
    return os.environ.get(VARIABLE), ""


def fit_on(
    cluster: Cluster, network: str = "eth0", timeout: float = 60.0, **environment: str
) -> Any:
    workers = HostWorkers(cluster, network)
    try:
        return workers.run_on([0, 1], fit, environment, timeout=timeout)
    finally:
        workers.close()


def test_a_name_that_leads_to_the_loopback_does_not_mislead() -> None:
    with hosts(2, own_address="127.0.1.1") as cluster:
        assert fit_on(cluster) == [("eth0", "")] * 2


@pytest.mark.long
def test_of_several_the_one_that_reaches_the_first_rank_is_taken_for_the_loopback() -> None:
    with hosts(2, networks=[FIRST, SECOND], own_address="127.0.1.1") as cluster:
        for host in cluster.hosts:
            host.cut("eth0")
        assert fit_on(cluster, "eth1") == [("eth1", "")] * 2


@pytest.mark.long
def test_a_second_interface_that_leads_nowhere_is_left_alone() -> None:
    with hosts(2, networks=[FIRST, SECOND]) as cluster:
        for host in cluster.hosts:
            host.cut("eth1")
        assert fit_on(cluster) == [(None, "")] * 2


@pytest.mark.long
def test_a_name_that_leads_to_a_dead_end_is_named_on_all_ranks_and_the_variable_helps() -> None:
    with hosts(2, networks=[FIRST, SECOND]) as cluster:
        for host in cluster.hosts:
            host.cut("eth0")
        for rank, (_, error) in enumerate(fit_on(cluster, "eth1", timeout=150.0)):
            assert f"On host host{rank} gloo takes what the name of the host leads to" in error
            assert f"eth0 (10.231.7.{rank + 1}), eth1 (10.231.8.{rank + 1})" in error
            assert f"Set {VARIABLE} on each host" in error
        assert fit_on(cluster, "eth1", **{VARIABLE: "eth1"}) == [("eth1", "")] * 2


@pytest.mark.long
def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    with hosts(2) as cluster:
        for _, error in fit_on(cluster, **{VARIABLE: "eth7"}):
            assert "eth7" in error
            assert "there are: eth0 (10.231.7." in error


@pytest.mark.parametrize("own", [None, pytest.param("", marks=pytest.mark.long)])
def test_ipv6_alone_is_enough(own: str | None) -> None:
    with hosts(2, networks=[IPV6], own_address=own) as cluster:
        assert fit_on(cluster) == [(None if own is None else "eth0", "")] * 2


def chosen() -> tuple[dict[str, str], list[str | None]]:
    first = os.environ["MASTER_ADDR"]
    return interfaces(), [choose_interface(first), choose_interface("127.0.1.1")]


def test_choices_on_hosts_without_names() -> None:
    with hosts(2, networks=[FIRST, SECOND], own_address="") as cluster:
        workers = HostWorkers(cluster, "eth1")
        found = workers.run_on([0, 1], chosen)
        workers.close()
    for rank, (addresses, choices) in enumerate(found):
        assert addresses["127.0.0.1"] == "lo"
        assert addresses[f"10.231.7.{rank + 1}"] == "eth0"
        assert addresses[f"10.231.8.{rank + 1}"] == "eth1"
        assert choices == ["eth1", None], "of two, none is the only other one"
