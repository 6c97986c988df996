"""The network interface that gloo takes on a host of several.

Left alone, torch takes the one that the host's own name leads to. In Debian's ``/etc/hosts`` that
is the loopback, and no other host reaches it. Then the interface that reaches the first rank is the
better one.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Container
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux: the request for an interface's IPv4 address
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def choose_interface(address: str) -> str | None:
    """Returns the interface to take instead of the loopback, on the way to the first rank's host.

    On that host itself its address may lead to the loopback, too; then its only other interface is
    taken. None if torch would not take the loopback, or if it is not clear what to take.
    """
    found = interfaces()
    if not leads_to_loopback(socket.gethostname(), found):
        return None
    with suppress(OSError):
        source = _source(address)
        if source in found and not _is_local(source):
            return found[source]
    others = {name for of, name in found.items() if not _is_local(of)}
    return others.pop() if len(others) == 1 else None


def describe_meeting() -> str:
    """Returns what a user can do if ranks have met at the first one and cannot reach each other."""
    found = ", ".join(f"{name} ({of})" for of, name in interfaces().items() if not _is_local(of))
    taken = os.environ.get(VARIABLE)
    return (
        f"The ranks have met, but their connections to each other failed. On host"
        f" {socket.gethostname()} gloo takes {taken or 'what the name of the host leads to'}"
        f" ({VARIABLE}{' is not set' if taken is None else f'={taken}'}); there are: {found}. Set"
        f" {VARIABLE} on each host to the interface that leads to the other hosts."
    )


def interfaces() -> dict[str, str]:
    """Returns the names of this host's interfaces by their addresses."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # has no IPv4 address
                answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[socket.inet_ntoa(answer[20:24])] = name
    with suppress(OSError):  # has no IPv6
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, *_, name = line.split()
            found[str(IPv6Address(int(digits, 16)))] = name
    return found


def leads_to_loopback(name: str, found: Container[str]) -> bool:
    """Returns whether torch takes the loopback, by its rule: the host name's first own address."""
    try:
        answers = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return True
    addresses = [str(answer[4][0]) for answer in answers]
    own = [a for a in addresses if a in found or ip_address(a).is_loopback]
    return not own or ip_address(own[0]).is_loopback


def _source(address: str) -> str:
    """Returns the address of this host that a connection would come from; sends nothing."""
    family, kind, _, _, place = socket.getaddrinfo(address, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as sock:
        sock.connect(place)
        return str(sock.getsockname()[0])


def _is_local(address: str) -> bool:
    parsed = ip_address(address)
    return parsed.is_loopback or parsed.is_link_local
