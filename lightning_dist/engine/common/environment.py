"""What must be the same for all processes of a run: versions, variables and the script.

Ranks with another torch or another script train on, and give wrong weights or hang much later. So a
run compares digests at its start, and the values only if these differ.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.common.table import Table

EnvironmentCheck = Literal["warn", "error", "off"]
"""What to do if the processes of a run have different environments."""

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_")
# A host has devices and folders of its own, and one rank's log is often enough.
_OWN_TO_HOSTS = ("_IFNAME", "_HCA", "_HOSTID", "_DEBUG", "_FILE", "_DIR", "_HOME", "_PATH")
_HOSTS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of one process."""

    host: str
    values: Mapping[str, str]  # what should be the same for all processes, by name

    @property
    def digest(self) -> str:
        """A short text that is the same for the same values."""
        return blake2b(repr(sorted(self.values.items())).encode(), digest_size=8).hexdigest()


def read_environment() -> Environment:
    """Reads this process's environment: versions, variables of the transports, and the script."""
    return Environment(socket.gethostname(), _loaded() | transport_variables(os.environ))


@cache
def _loaded() -> dict[str, str]:
    """Reads what this process has loaded for good; later changes on disk do not concern it."""
    values = {"Python": platform.python_version(), "torch": torch.__version__}
    values |= {package: _version(package) for package in ("lightning", "lightning-dist")}
    return values | {"script": digest_script()}


def transport_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of NCCL, gloo and torch that should be the same on all hosts."""
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(_PREFIXES) and not name.endswith(_OWN_TO_HOSTS)
    }


def compare_environments(environments: Sequence[Environment]) -> Table:
    """Returns a row for each value of what differs between ranks, and those that have it."""
    rows: list[tuple[str, str, str]] = []
    hosts = [environment.host for environment in environments]
    for name in sorted({name for environment in environments for name in environment.values}):
        ranks: dict[str, list[int]] = {}
        for rank, environment in enumerate(environments):
            ranks.setdefault(environment.values.get(name, "(not set)"), []).append(rank)
        if len(ranks) == 1:
            continue
        for index, (value, places) in enumerate(ranks.items()):
            rows.append(("" if index else name, value, name_places(places, hosts)))
    return Table("Different environments", ("what", "value", "hosts"), tuple(rows))


def name_places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Lists ranks by host, such as ``"a (ranks 0, 1), b (rank 2)"``, given the hosts of all."""
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    places = [
        f"{host} (rank{'s' * (len(own) > 1)} {shorten(own, _HOSTS_SHOWN)})"
        for host, own in by_host.items()
    ]
    return shorten(places, _HOSTS_SHOWN)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a clone on the path
        return "not installed"


def digest_script() -> str:
    """Returns a digest of the script that this process runs."""
    path = getattr(sys.modules["__main__"], "__file__", None)  # a notebook has none
    if path is None or not os.path.isfile(path):
        return "none"
    return blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()
