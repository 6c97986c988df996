"""Addresses and ports that lead to no store."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_dist.engine.comms import contact
from lightning_dist.engine.comms.contact import (
    ContactError,
    await_port,
    explain_contact,
    explain_serving,
    open_store,
)
from tests.helpers.processes.workers import free_port

HERE = "127.0.0.1"


@contextmanager
def silent() -> Iterator[int]:
    """Listens, and says nothing."""
    with socket.socket() as server:
        server.bind((HERE, 0))
        server.listen(50)
        yield server.getsockname()[1]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EARLY_SECONDS", "_PROBE_SECONDS", "_HANDSHAKE_SECONDS"):
        monkeypatch.setattr(contact, name, 0.2)


def test_a_port_at_which_nothing_listens_is_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    with socket.socket() as held:  # so that no other process listens there
        held.bind((HERE, 0))
        with pytest.raises(ContactError, match=r"nothing listens at MASTER_ADDR=127.*Has rank 0"):
            await_port(HERE, held.getsockname()[1], 0.5)
    assert time.monotonic() > begin + 0.5
    assert capsys.readouterr().err.count("Waiting up to 0.5 s") == 1


def test_a_port_that_drops_what_is_sent_is_given_up_early() -> None:
    with socket.socket() as full, socket.socket() as one, socket.socket() as two:
        full.bind((HERE, 0))
        full.listen(0)  # Linux drops what comes when its queue is full, as a firewall does
        for other in (one, two):
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        with pytest.raises(ContactError, match=r"does not answer.*firewall"):
            await_port(HERE, full.getsockname()[1], 60)


def test_an_unknown_name_is_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "create_connection", unknown)
    with pytest.raises(ContactError, match=r"name MASTER_ADDR=far is unknown .*/etc/hosts"):
        await_port("far", 29500, 60)


def test_other_reasons_are_passed_on() -> None:
    assert explain_contact("far", 1, OSError("no route"))[0].endswith("no route")


def test_a_process_that_is_no_store_is_named() -> None:
    with silent() as port, pytest.raises(ContactError, match="no run's first rank"):
        open_store(HERE, port, is_master=False)


def test_a_port_that_is_taken_is_named() -> None:
    with silent() as port, pytest.raises(ContactError, match=f"MASTER_PORT={port} is taken"):
        open_store(HERE, port, is_master=True)


def test_an_address_of_another_host_is_no_place_to_serve() -> None:
    nowhere = "255.255.255.255"
    with pytest.raises(ContactError, match=f"cannot reach it at MASTER_ADDR={nowhere}"):
        open_store(nowhere, free_port(), is_master=True)


def test_a_port_that_one_may_not_serve_is_named() -> None:
    assert "above 1023" in explain_serving(80, errno.EACCES)[1]
