from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.hosts.cluster import Cluster
from tests.helpers.hosts.workers import HostWorkers


@pytest.fixture(scope="module")
def host_workers(cluster: Cluster) -> Iterator[HostWorkers]:
    """Workers that enter the hosts of a module's cluster."""
    workers = HostWorkers(cluster)
    yield workers
    workers.close()
