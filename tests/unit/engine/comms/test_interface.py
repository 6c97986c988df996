from __future__ import annotations

import socket

import pytest

from lightning_dist.engine.comms import interface


def lead_own_name_to(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: address)


def have(monkeypatch: pytest.MonkeyPatch, **addresses: str) -> None:
    found = {address: name for name, address in addresses.items()}
    monkeypatch.setattr(interface, "interfaces", lambda: {"127.0.0.1": "lo", **found})


def test_the_loopback_is_an_interface() -> None:
    assert interface.interfaces()["127.0.0.1"] == "lo"


def test_a_name_that_leads_to_an_own_address_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, eth0="192.0.2.1")
    lead_own_name_to(monkeypatch, "192.0.2.1")
    assert interface.choose_interface("127.0.0.1") is None


@pytest.mark.parametrize("own", ["127.0.1.1", "192.0.2.9"])
def test_for_the_loopback_the_only_other_interface_is_taken(
    monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    lead_own_name_to(monkeypatch, own)  # to the loopback, or to an address of another host
    have(monkeypatch, eth0="192.0.2.1")
    assert interface.choose_interface("127.0.0.1") == "eth0"
    have(monkeypatch, eth0="192.0.2.1", eth1="198.51.100.1")
    assert interface.choose_interface("127.0.0.1") is None
    have(monkeypatch, eth0="192.0.2.1", eth1="fe80::1")
    assert interface.choose_interface("127.0.0.1") == "eth0"


def test_a_user_reads_which_interfaces_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, eth0="192.0.2.1", eth1="fe80::1")
    monkeypatch.setenv(interface.VARIABLE, "eth7")
    text = interface.describe_meeting()
    assert "gloo takes eth7 (GLOO_SOCKET_IFNAME=eth7); there are: eth0 (192.0.2.1). Set" in text
    monkeypatch.delenv(interface.VARIABLE)
    assert "GLOO_SOCKET_IFNAME is not set" in interface.describe_meeting()
