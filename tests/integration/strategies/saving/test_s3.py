"""Sharded checkpoints on a local S3 server, by two ranks and by a process that is killed.

Runs where moto's server and s3fs are installed: ``pip install 'moto[server]' s3fs``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_dist.checkpoint import is_sharded, load_full, save_sharded
from lightning_dist.engine.checkpoint.places import UrlPlace
from tests.helpers.processes.workers import CONTEXT, WorkerPool
from tests.integration.strategies.saving.test_urls import save_and_resume

WHY = "needs a local S3 server: pip install 'moto[server]' s3fs"
s3fs = pytest.importorskip("s3fs", reason=WHY)
moto_server = pytest.importorskip("moto.server", reason=WHY)

NUM_KILLS = 6
SIZE = 50_000


@pytest.fixture(scope="module")
def variables() -> Iterator[dict[str, str]]:
    """Starts a server with a bucket, and gives the environment variables of its clients."""
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield settings
    server.stop()


def resumed_on_s3(variables: dict[str, str], *arguments: Any) -> tuple[dict[str, Tensor], ...]:
    os.environ.update(variables)
    return save_and_resume(*arguments)


@pytest.mark.parametrize("name", ["async", "fsdp", "pipedream"])
def test_a_run_goes_on_from_a_bucket(
    workers: WorkerPool, variables: dict[str, str], name: str
) -> None:
    url = f"s3://bucket/{name}"
    for whole, resumed in workers.run(2, resumed_on_s3, variables, name, name, url, timeout=120):
        for parameter, value in whole.items():
            assert torch.equal(resumed[parameter], value), parameter


def checkpoint(value: int) -> dict[str, Any]:
    return {"value": value, "state_dict": {"a": torch.full((SIZE,), value)}}


def save_for_ever(variables: dict[str, str], url: str, first: int) -> None:
    os.environ.update(variables)
    for value in count(first):
        save_sharded(checkpoint(value), url, None)


def test_a_killed_process_leaves_a_whole_checkpoint(variables: dict[str, str]) -> None:
    url = "s3://bucket/killed/last.ckpt"
    save_sharded(checkpoint(0), url, None)
    values = [0]
    for kill in range(NUM_KILLS):
        process = CONTEXT.Process(target=save_for_ever, args=(variables, url, values[-1] + 1))
        process.start()
        while UrlPlace(url).load_marker(weights_only=True)[0]["value"] == values[-1]:
            time.sleep(0.01)
        time.sleep(0.03 * kill)
        process.kill()
        process.join()
        assert is_sharded(url)
        found = load_full(url)
        assert torch.equal(found["state_dict"]["a"], torch.full((SIZE,), found["value"]))
        values.append(found["value"])
    assert values == sorted(set(values))
    save_sharded(checkpoint(-1), url, None)
    names = s3fs.S3FileSystem(skip_instance_cache=True).ls(url, detail=False)
    assert len([name for name in names if "shards-" in name]) == 1, "what is left is swept up"
