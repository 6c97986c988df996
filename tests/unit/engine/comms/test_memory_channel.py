from __future__ import annotations

import pytest
import torch

from lightning_dist.engine.comms.channel import MemoryChannel


def test_each_port_gets_its_own_in_order() -> None:
    channel = MemoryChannel()
    for tag, value in ((1, "a"), (2, "b"), (1, "c"), (3, "d")):
        channel.send(value, tag=tag)
    assert channel.receive(tag=3) == "d"
    assert channel.receive(tag=1) == "a"
    assert channel.receive(tag=1) == "c"
    assert channel.receive(tag=2) == "b"


def test_tensors_are_cut_from_their_graph() -> None:
    channel = MemoryChannel()
    sent = torch.ones(2, requires_grad=True) * 2
    channel.send([sent])
    (received,) = channel.receive()
    assert received.is_leaf
    assert received.requires_grad
    assert received.data_ptr() == sent.data_ptr()


def test_an_interrupt_reaches_who_waits() -> None:
    channel = MemoryChannel()
    channel.send("for another", tag=1)
    channel.interrupt(KeyError("the cause"))
    with pytest.raises(KeyError, match="the cause"):
        channel.receive()
