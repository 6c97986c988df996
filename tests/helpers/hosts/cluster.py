"""Hosts on one machine, for tests and benches: each has its own network stack, processes and disk.

A host is a network, process, mount, name and IPC namespace. So it has its own interfaces, ports and
name, shares no memory with the other hosts, and cannot see their processes. Hosts are joined by
switches: a bridge in one more namespace, with a cable to each host, whose rate ``tc`` limits in
both directions. It is a veth pair, or a :mod:`.lossy_cable` if packets shall be late or lost.
Python and the code come from this machine's file system, which the hosts see at its usual paths;
``Cluster.disk`` is their own.

    with hosts(2, networks=[Network(rate="100mbit")]) as cluster:
        cluster.run([["python", "script.py", "0"], ["python", "script.py", "1"]])

Ports are free on a new host, and all names are its own: two runs side by side do not meet. What
there is vanishes with the process that made it, even if that is killed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.helpers.hosts.namespaces import (
    HostProcess,
    Namespaces,
    why_no_hosts,
    why_no_lossy_cable,
)

_QUEUE_SECONDS = 0.05
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9}


@dataclass(frozen=True)
class Network:
    """A switch with a cable to each host.

    Attributes:
        name: Of the interface on each host.
        rate: What a cable carries each way, as ``tc`` writes it: "10gbit", "200mbit". None is
            unlimited.
        delay_seconds: How long a packet is on a cable. There are two between two hosts.
        loss: The part of the packets that a cable loses: 0.01 is one of a hundred.
        ipv4: The first three bytes of the hosts' addresses, or None.
        ipv6: The first 64 bits of the hosts' addresses, "fd00:7:0:0", or None.
    """

    name: str = "eth0"
    rate: str | None = None
    delay_seconds: float = 0.0
    loss: float = 0.0
    ipv4: str | None = "10.231.7"
    ipv6: str | None = None

    def addresses(self, index: int) -> list[str]:
        """Returns the addresses of a host, IPv4 first."""
        ipv4 = [] if self.ipv4 is None else [f"{self.ipv4}.{index + 1}"]
        return ipv4 + ([] if self.ipv6 is None else [f"{self.ipv6}::{index + 1:x}"])

    def shape(self, interface: str) -> list[str]:
        """Returns the lines for ``tc`` that limit what leaves an interface."""
        if self.rate is None:
            return []
        # A bucket of a millisecond, or of the largest packet of a cable. More would let messages
        # through whole, behind a pause.
        burst = max(64 * 1024, int(bits_per_second(self.rate) / 8 / 1000))
        bucket = f"burst {burst} latency {_QUEUE_SECONDS * 1e3:.0f}ms"
        return [f"qdisc add dev {interface} root tbf rate {self.rate} {bucket}"]

    @property
    def is_lossy(self) -> bool:
        """Whether packets are late or lost."""
        return self.delay_seconds > 0 or self.loss > 0


def bits_per_second(rate: str) -> float:
    """Reads a rate as ``tc`` does: "200mbit" is 2e8."""
    match = re.fullmatch(r"([\d.]+)([kmg]?bit)", rate)
    if match is None:
        raise ValueError(f"{rate!r} is no rate; write it as '10gbit', '200mbit' or '500kbit'")
    return float(match[1]) * _BITS[match[2]]


@dataclass(frozen=True)
class Traffic:
    """What has gone over an interface, headers included, in bytes."""

    sent_bytes: int
    received_bytes: int

    def since(self, before: Traffic) -> Traffic:
        """Returns what has gone since an earlier look."""
        return Traffic(
            self.sent_bytes - before.sent_bytes, self.received_bytes - before.received_bytes
        )


@dataclass
class Host:
    """A host of a cluster, running until it is killed.

    Attributes:
        index: Its place in the cluster, from 0.
        name: Its host name. All hosts can look it up.
        networks: Those it has an interface of.
        namespaces: Where its processes run.
    """

    index: int
    name: str
    networks: tuple[Network, ...]
    _ground: Namespaces
    _boot_script: str
    namespaces: Namespaces = field(init=False)
    _lossy_cables: list[HostProcess] = field(default_factory=list)

    def boot(self) -> None:
        """Starts the host and plugs in its cables."""
        self.namespaces = Namespaces(self._boot_script, inside=self._ground)
        for network in self.networks:
            port = self._port(network.name)
            far = f"far{self.index}"
            if network.is_lossy:
                self._start_lossy_cable(port, far, network)
            else:
                self._ground.configure("ip", [f"link add {port} type veth peer name {far}"])
            # The same after another boot: the other hosts remember it.
            address = f"link set {far} address 02:00:00:00:00:{self.index:02x}"
            move = f"link set {far} netns {self.namespaces.pid} name {network.name}"
            join = f"link set {port} master {network.name} up"
            self._ground.configure("ip", [address, move, join])
            self._ground.configure("tc", network.shape(port))
            self.namespaces.configure("tc", network.shape(network.name))
            lengths = {True: "64 nodad", False: "24"}
            addresses = [
                f"addr add {address}/{lengths[':' in address]} dev {network.name}"
                for address in network.addresses(self.index)
            ]
            self.namespaces.configure("ip", [*addresses, f"link set {network.name} up"])

    def _start_lossy_cable(self, port: str, far: str, network: Network) -> None:
        ends = [port, far, str(network.delay_seconds), str(network.loss)]
        cable = HostProcess(
            self._ground,
            [sys.executable, "-m", "tests.helpers.hosts.lossy_cable", *ends],
            stdout=subprocess.PIPE,
        )
        self._lossy_cables.append(cable)
        assert cable.stdout is not None
        if cable.stdout.readline() != "ready\n":
            raise RuntimeError(f"no cable {port}")

    def kill(self) -> None:
        """Kills all processes at once, as SIGKILL does, and then unplugs the cables.

        The kernel closes the processes' connections, and the other hosts hear of that. To them a
        host that has lost its power is silent: call :meth:`cut` first.
        """
        self.namespaces.kill()
        while self._lossy_cables:
            cable = self._lossy_cables.pop()
            cable.kill()
            cable.communicate()
        for network in self.networks:
            # With the host's end the kernel removes this one too, in its own time.
            with suppress(RuntimeError):
                self._ground.configure("ip", [f"link del {self._port(network.name)}"])

    def cut(self, network: str = "eth0") -> None:
        """Pulls a cable out at the switch: nothing arrives any more, and connections stay open."""
        self._ground.configure("ip", [f"link set {self._port(network)} down"])

    def mend(self, network: str = "eth0") -> None:
        """Plugs a cable in again."""
        self._ground.configure("ip", [f"link set {self._port(network)} up"])

    def address(self, network: str = "eth0") -> str:
        """Returns the host's address on a network: the IPv4 one, if there is one."""
        (found,) = (network_ for network_ in self.networks if network_.name == network)
        return found.addresses(self.index)[0]

    def traffic(self, network: str = "eth0") -> Traffic:
        """Returns what has gone over an interface so far."""
        shown = self.namespaces.output_of("ip", "-s", "-j", "link", "show", network)
        counts = json.loads(shown)[0]["stats64"]
        return Traffic(counts["tx"]["bytes"], counts["rx"]["bytes"])

    def path(self, path: Path) -> Path:
        """Returns where this process finds a path of the host, while the host runs."""
        return Path(f"/proc/{self.namespaces.pid}/root") / path.relative_to("/")

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> HostProcess:
        """Starts a process on the host; see :class:`HostProcess` for its arguments."""
        return HostProcess(self.namespaces, command, env=env, **options)

    def _port(self, network: str) -> str:
        return f"{network}p{self.index}"  # the switch's end of the cable


@dataclass
class Cluster:
    """Hosts that are joined by networks.

    Attributes:
        hosts: The hosts, all running at first.
        disk: The path of the disk, the same on each host: private to each, or shared.
    """

    hosts: list[Host]
    disk: Path

    def run(
        self,
        commands: Sequence[Sequence[str]],
        *,
        env: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None,
        timeout: float = 120.0,
        check: bool = True,
    ) -> list[subprocess.CompletedProcess[str]]:
        """Runs a command on each host at once and waits for all.

        Args:
            commands: The command of each host.
            env: Added to this process's environment, one for all hosts or one for each.
            timeout: Seconds until what still runs is killed.
            check: Whether all have to succeed.

        Returns:
            What each has printed; stderr is among stdout.

        Raises:
            RuntimeError: A command failed or took too long, and ``check`` is set.
        """
        environments = [env] * len(commands) if env is None or isinstance(env, Mapping) else env
        deadline = time.monotonic() + timeout
        with ExitStack() as files:
            running: list[tuple[HostProcess, IO[str]]] = []
            for host, command, environment in zip(self.hosts, commands, environments, strict=True):
                output = files.enter_context(tempfile.TemporaryFile("w+"))
                process = host.popen(
                    command, env=environment, stdout=output, stderr=subprocess.STDOUT
                )
                running.append((process, output))
            done = [_finish(process, output, deadline) for process, output in running]
        if check and any(result.returncode for result in done):
            reports = [
                f"{host.name}: {result.args} ended with {result.returncode}:\n{result.stdout}"
                for host, result in zip(self.hosts, done, strict=True)
            ]
            raise RuntimeError("\n".join(reports))
        return done


def _finish(
    process: HostProcess, output: IO[str], deadline: float
) -> subprocess.CompletedProcess[str]:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    output.seek(0)
    return subprocess.CompletedProcess(process.args, process.returncode, output.read())


@contextmanager
def hosts(
    count: int,
    *,
    networks: Sequence[Network] = (Network(),),
    shared_disk: bool = False,
    disk_size: str = "1g",
    own_address: str | None = None,
) -> Iterator[Cluster]:
    """Starts hosts, and removes all of them and what runs on them.

    Args:
        count: How many.
        networks: Each joins all hosts. The first one's addresses are those of the hosts' names.
        shared_disk: Whether all hosts have the same disk.
        disk_size: What a disk holds, as tmpfs writes it. A disk is memory, once it is written to.
        own_address: What each host finds by its own name, "127.0.1.1" as Debian has it, instead of
            its address; an empty one is nothing.

    Raises:
        RuntimeError: This machine can have no hosts, or its links no delay.
    """
    is_lossy = any(network.is_lossy for network in networks)
    if why := why_no_hosts() or (why_no_lossy_cable() if is_lossy else None):
        raise RuntimeError(why)
    names = [f"host{index}" for index in range(count)]
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        disk = Path(folder) / "disk"
        disk.mkdir()
        mounts = ["shared"] * count if shared_disk else names
        for mount in set(mounts):
            (Path(folder) / mount).mkdir()
        addresses = [networks[0].addresses(index)[0] for index in range(count)]
        for index, name in enumerate(names):
            known = dict(zip(names, addresses, strict=True))
            known[name] = addresses[index] if own_address is None else own_address
            lines = [f"{address} {name}\n" for name, address in known.items() if address]
            content = "".join(["127.0.0.1 localhost\n::1 localhost\n", *lines])
            (Path(folder) / f"{name}.names").write_text(content)
        disks = [
            f"mount -t tmpfs -o size={disk_size} tmpfs {folder}/{mount}" for mount in set(mounts)
        ]
        ground = Namespaces("\n".join(disks))
        cluster = Cluster([], disk)
        try:
            for network in networks:
                bridge = [f"link add {network.name} type bridge", f"link set {network.name} up"]
                ground.configure("ip", bridge)
            for index, name in enumerate(names):
                script = (
                    f"hostname {name}; ip link set lo up; mount -t tmpfs tmpfs /dev/shm\n"
                    f"mount --bind {folder}/{mounts[index]} {disk}\n"
                    f"mount --bind {folder}/{name}.names /etc/hosts"
                )
                cluster.hosts.append(Host(index, name, tuple(networks), ground, script))
                cluster.hosts[-1].boot()
            yield cluster
        finally:
            for host in cluster.hosts:
                host.kill()
            ground.kill()
