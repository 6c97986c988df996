"""Hosts without a shared disk: what can be saved there, and what is refused before it hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from lightning.pytorch.strategies import Strategy

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from lightning_dist.checkpoint import load_full
from tests.helpers.hosts.cluster import Cluster, hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.integration.hosts.common import DEPTH, Unlogged

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

SHARDED: dict[str, Callable[..., Strategy]] = {
    "fsdp": FSDPStrategy,
    "pipedream": partial(PipelineStrategy, schedule="pipedream"),
}
WHOLE: dict[str, Callable[[], Strategy]] = {
    "ddp": DDPStrategy,
    **{f"{name}, one file": partial(make, save_full=True) for name, make in SHARDED.items()},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hosts(2) as cluster:
        yield cluster


def save(name: str, path: str, resume: str | None = None) -> tuple[str, float]:
    """Trains and saves; returns the error, and the seconds that the save took."""
    strategy = {**SHARDED, **WHOLE}[name]()
    epochs = 1 if resume is None else 2
    trainer = make_trainer(num_nodes=2, devices=1, strategy=strategy, max_epochs=epochs)
    try:
        module = make_module(Unlogged, depth=DEPTH)
        trainer.fit(module, make_loader(8), ckpt_path=resume, weights_only=True)
        begin = time.monotonic()
        trainer.save_checkpoint(path)
    except ValueError as error:
        return str(error), time.monotonic() - begin if resume is None else 0.0
    return "", time.monotonic() - begin


@pytest.mark.long
@pytest.mark.parametrize("name", SHARDED)
def test_the_first_sharded_save_is_refused_on_all_ranks_with_the_way_out(
    cluster: Cluster, host_workers: HostWorkers, name: str
) -> None:
    path = cluster.disk / f"{name}.ckpt"
    (error, seconds), other = host_workers.run_on([0, 1], save, name, str(path))
    assert error == other[0]
    assert "rank 1 (host host1) cannot see the disk that rank 0 (host host0) writes to" in error
    assert "`save_full=True`" in error
    assert max(seconds, other[1]) < 30
    for host in cluster.hosts:
        assert not host.path(path).exists()


@pytest.mark.some("pipedream, one file")
@pytest.mark.parametrize("name", WHOLE)
def test_one_file_is_saved_on_the_first_host_and_resumed_once_all_have_it(
    cluster: Cluster, host_workers: HostWorkers, name: str, tmp_path: Path
) -> None:
    path = cluster.disk / f"{name}.ckpt"
    after = str(cluster.disk / "after.ckpt")
    assert [error for error, _ in host_workers.run_on([0, 1], save, name, str(path))] == ["", ""]
    first, second = (host.path(path) for host in cluster.hosts)
    assert first.is_file()
    assert not second.exists()
    assert load_full(first)["global_step"] == 1
    (error, _), other = host_workers.run_on([0, 1], save, name, after, str(path))
    assert error == other[0]
    assert "is a checkpoint on host host0, and rank 1 (host host1) cannot see it" in error
    second.write_bytes(first.read_bytes())
    resumed = host_workers.run_on([0, 1], save, name, after, str(path))
    assert [error for error, _ in resumed] == ["", ""]
    assert load_full(cluster.hosts[0].path(Path(after)))["global_step"] == 2
