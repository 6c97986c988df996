"""The bench of a limited link: it refuses times of what did not cross the link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.benchmarks.network import LEAST_BYTES, bytes_per_batch, run_on_hosts
from tests.helpers.hosts.cluster import hosts
from tests.helpers.hosts.namespaces import why_no_hosts
from tests.helpers.hosts.workers import HostWorkers

pytestmark = [
    pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts())),
    pytest.mark.long,
]

NAME = "ours pipedream"


class OnOneHost(HostWorkers):
    """Puts all ranks on the first host, whatever is asked for."""

    def run_on(
        self, hosts: Sequence[int], case: Callable[..., Any], *args: Any, timeout: float = 60.0
    ) -> list[Any]:
        return super().run_on([0] * len(hosts), case, *args, timeout=timeout)


def test_a_batch_that_takes_another_way_is_an_error() -> None:
    with hosts(2) as cluster:
        workers = OnOneHost(cluster)
        with pytest.raises(RuntimeError, match="ours pipedream: a host has sent .* another way"):
            run_on_hosts(cluster, workers, NAME, 1)
        workers.close()


def test_a_pipeline_sends_its_activations_and_little_more() -> None:
    with hosts(2) as cluster:
        workers = HostWorkers(cluster)
        sent = bytes_per_batch(cluster, workers, NAME, 4)
        workers.close()
    assert LEAST_BYTES[NAME]() <= sent < 1.2 * LEAST_BYTES[NAME]()
