"""The hosts of the other tests: that they are as far apart as hosts are."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hosts.cluster import Cluster, Host, Network, bits_per_second, hosts
from tests.helpers.hosts.namespaces import why_no_hosts, why_no_lossy_cable

pytestmark = pytest.mark.skipif(why_no_hosts() is not None, reason=str(why_no_hosts()))

MIB = 2**20
LISTEN = """
import socket
server = socket.create_server(("", 5000))
print("listening", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
"""
SEND = """
import socket, sys, time
connection = socket.create_connection(("host0", 5000), timeout=10)
begin = time.monotonic()
connection.sendall(bytes(int(sys.argv[1])))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)  # until all has arrived
print(time.monotonic() - begin)
"""
REACH = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 5000), timeout=float(sys.argv[2]))
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    networks = [Network(rate="200mbit"), Network("eth1", ipv4=None, ipv6="fd00:7:0:0")]
    with hosts(2, networks=networks) as cluster:
        yield cluster


def said(host: Host, *command: str) -> str:
    return host.popen(command, stdout=subprocess.PIPE).communicate(timeout=20)[0].strip()


def reach(host: Host, address: str, seconds: float = 5.0) -> str:
    """Returns the error of a connection to a port where nothing listens."""
    return said(host, sys.executable, "-c", REACH, address, str(seconds))


def processes(host: Host) -> list[int]:
    entries = said(host, "ls", "/proc").split()
    return [int(entry) for entry in entries if entry.isdigit()]


def test_a_host_has_its_own_name_processes_memory_and_ports(cluster: Cluster) -> None:
    first, second = cluster.hosts
    assert [said(host, "hostname") for host in cluster.hosts] == ["host0", "host1"]
    with first.popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        assert len(processes(first)) == len(processes(second)) + 1 < 10
        said(first, "touch", "/dev/shm/a")
        assert said(second, "ls", "/dev/shm") == ""
        assert reach(second, "localhost") == "ConnectionRefusedError"
        assert reach(second, "host0") == ""
        server.kill()


def test_a_cable_carries_its_rate_and_counts_what_it_carries(cluster: Cluster) -> None:
    first, second = cluster.hosts
    size = 10 * MIB
    with first.popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        before = [host.traffic() for host in cluster.hosts]
        seconds = float(said(second, sys.executable, "-c", SEND, str(size)))
    there, back = (h.traffic().since(b) for h, b in zip(cluster.hosts, before, strict=True))
    assert 8 * size / seconds < 1.05 * bits_per_second("200mbit")
    assert size < there.received_bytes < 1.05 * size
    assert size < back.sent_bytes < 1.05 * size
    assert second.traffic("eth1").sent_bytes < MIB


def test_a_cable_that_is_pulled_out_carries_nothing(cluster: Cluster) -> None:
    first, second = cluster.hosts
    assert reach(second, "host0") == "ConnectionRefusedError"
    first.cut()
    assert reach(second, "host0", 0.3) == "TimeoutError"
    assert reach(second, first.address("eth1")) == "ConnectionRefusedError"
    first.mend()
    assert reach(second, "host0") == "ConnectionRefusedError"


def test_a_disk_is_private_or_shared(cluster: Cluster) -> None:
    first, second = cluster.hosts
    said(first, "touch", str(cluster.disk / "a"))
    assert first.path(cluster.disk / "a").exists()
    assert not second.path(cluster.disk / "a").exists()
    with hosts(2, shared_disk=True, disk_size="1m") as other:
        said(other.hosts[0], "touch", str(other.disk / "a"))
        assert said(other.hosts[1], "ls", str(other.disk)) == "a"
        full = said(other.hosts[1], "sh", "-c", f"head -c 2M /dev/zero > {other.disk}/b || df")
        assert "100%" in full


def test_signals_reach_the_process_itself(cluster: Cluster) -> None:
    sleeper = cluster.hosts[0].popen(["sleep", "60"])
    inner = Path(f"/proc/{sleeper.inner_pid}/stat")
    sleeper.send_signal(signal.SIGSTOP)
    wait_until(lambda: inner.read_text().split()[2] == "T")
    sleeper.send_signal(signal.SIGCONT)
    wait_until(lambda: inner.read_text().split()[2] == "S")
    sleeper.terminate()
    assert sleeper.wait(10) == -signal.SIGTERM
    assert not inner.exists()


def test_a_killed_host_comes_back_with_its_disk() -> None:
    with hosts(2) as cluster:
        first, second = cluster.hosts
        said(first, "touch", str(cluster.disk / "a"))
        sleeper = first.popen(["sleep", "60"])
        assert sleeper.inner_pid  # by then it is inside
        first.kill()
        assert sleeper.wait(10) == -signal.SIGKILL
        assert reach(second, "host0", 0.3) != "ConnectionRefusedError"
        first.boot()
        assert reach(second, "host0") == "ConnectionRefusedError"
        assert said(first, "ls", str(cluster.disk)) == "a"


def test_nothing_is_left_even_of_hosts_whose_maker_is_killed(tmp_path: Path) -> None:
    script = (
        "import time\n"
        "from tests.helpers.hosts.cluster import hosts\n"
        "with hosts(2) as cluster:\n"
        "    sleepers = [host.popen(['sleep', '60']) for host in cluster.hosts]\n"
        "    print(*(sleeper.inner_pid for sleeper in sleepers), flush=True)\n"
        "    time.sleep(60)\n"
    )
    maker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    sleepers = [Path(f"/proc/{pid}") for pid in maker.stdout.readline().split()]
    assert [sleeper.exists() for sleeper in sleepers] == [True, True]
    maker.kill()
    maker.communicate()
    wait_until(lambda: not any(sleeper.exists() for sleeper in sleepers))


def test_a_command_that_fails_or_hangs_is_reported_with_what_it_said(cluster: Cluster) -> None:
    commands = [["sh", "-c", "echo mine; exit 3"], ["sh", "-c", "echo yours; sleep 60"]]
    with pytest.raises(RuntimeError, match="host0.* ended with 3:\nmine\n\nhost1.*-9:\nyours"):
        cluster.run(commands, timeout=1.0)


@pytest.mark.skipif(why_no_lossy_cable() is not None, reason=str(why_no_lossy_cable()))
def test_packets_on_a_lossy_cable_are_late_and_some_never_come() -> None:
    with hosts(2, networks=[Network(delay_seconds=0.01, loss=0.02)]) as cluster:
        first, second = cluster.hosts
        before = second.traffic()
        with first.popen([sys.executable, "-c", LISTEN], stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == "listening\n"
            seconds = float(said(second, sys.executable, "-c", SEND, str(MIB)))
        assert seconds > 0.08  # there and back over two cables, at least twice
        # Headers are less than 5 %. The rest was sent again.
        assert second.traffic().since(before).sent_bytes > 1.06 * MIB
        second.kill()
        second.boot()
        assert reach(first, "host1") == "ConnectionRefusedError"


def wait_until(condition: object, seconds: float = 10.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
