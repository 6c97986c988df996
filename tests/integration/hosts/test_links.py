"""Links between hosts, whose rate is known, and what an all-reduce over them takes."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_dist.engine.planning.collectives import ALGORITHMS
from lightning_dist.engine.planning.links import LinkFit
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.engine.profiling.links import measure_links
from tests.helpers.hosts.cluster import Network, bits_per_second, hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers

pytestmark = [
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.long,
]

SIZES = (1 << 22, 1 << 24)  # tc lets 256 KiB through at once
HEADERS = 1500 / 1448  # bytes on the cable by bytes of a message


def measure(axes: dict[str, int]) -> tuple[dict[str, LinkFit], dict[str, dict[int, float]]]:
    """Returns the links, and the seconds of all-reduces along each axis by their bytes."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    links = measure_links(mesh)
    seconds = {
        name: {size: all_reduce(mesh.get_group(name), size) for size in SIZES} for name in links
    }
    dist.destroy_process_group()
    return links, seconds


def all_reduce(group: dist.ProcessGroup, num_bytes: int) -> float:
    value = torch.zeros(num_bytes // 4)
    times = []
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(value, group=group)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@pytest.mark.parametrize("rate", ["1gbit", "200mbit"])
def test_the_rate_is_found_and_an_all_reduce_predicted(rate: str) -> None:
    (ring,) = (a for a in ALGORITHMS[MessageKind.ALL_REDUCE] if a.name == "ring")
    with hosts(4, networks=[Network(rate=rate)]) as cluster:
        workers = HostWorkers(cluster)
        alone = workers.run_on([0, 1, 2, 3], measure, {"dp": 4}, timeout=200.0)
        shared = workers.run_on([0, 0, 1, 1], measure, {"dp": 2, "tp": 2}, timeout=200.0)
        workers.close()
    true = bits_per_second(rate) / 8 / HEADERS
    (links, seconds), *others = alone
    assert all(found == links for found, _ in others)
    link = links["dp"].link
    assert link.bytes_per_second == pytest.approx(true, rel=0.1)
    for size, measured in seconds["dp"].items():
        assert ring.seconds(4, size, link) == pytest.approx(measured, rel=0.15)
    (links, _), *_ = shared
    assert links["dp"].link.bytes_per_second < 0.75 * true  # two groups share a cable
    assert links["tp"].link.bytes_per_second > 2 * true
