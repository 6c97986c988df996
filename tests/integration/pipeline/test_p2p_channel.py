"""Messages whose tensors travel point to point, and what goes wrong with them."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dist.engine.comms.connect import connect
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.comms.p2p_channel import P2PReceiver, P2PSender, connect_ends
from tests.helpers.processes.workers import WorkerPool

CPU = torch.device("cpu")


def open_ends(timeout_seconds: float = 10.0) -> tuple[P2PSender | None, P2PReceiver | None]:
    """Opens a channel from rank 0 to rank 1."""
    dist.init_process_group("gloo")
    control, data = (dist.new_group(timeout=timedelta(days=1)) for _ in range(2))
    connect_ends(data, 0, CPU)
    if dist.get_rank() == 0:
        return P2PSender(data, 1, CPU, DistributedSender(control, 1), copies_leaves=True), None
    schemas = DistributedReceiver(control, 0, CPU, timeout_seconds)
    return None, P2PReceiver(data, 0, CPU, timeout_seconds, schemas)


DTYPES = (torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64)


def message(number: int) -> dict[str, Any]:
    """A tree with the properties of which there are a few kinds; its key is the kind."""
    kind = number % 5
    rows = torch.arange(12 * (kind + 1)).reshape(-1, 4)
    some = (rows + number).to(DTYPES[kind])
    real = (rows.T * 0.5 + number).requires_grad_()  # not contiguous
    empty, scalar = torch.empty(0, 3), torch.tensor(float(number))
    return {"kind": kind, "x": (some, [real, None, empty]), "loss": scalar}


def exchange() -> int:
    """Sends messages of five keys in turns; returns how many schemas travelled."""
    sender, receiver = open_ends()
    schemas = 0
    for number in range(30):
        sent = message(number)
        if sender is not None:
            with mock.patch.object(
                sender._control, "send", side_effect=sender._control.send
            ) as control:
                sender.send(sent, tag=number, key=sent["kind"])
            schemas += control.call_count
            continue
        assert receiver is not None
        found = receiver.receive(tag=number, key=sent["kind"])
        assert found["kind"] == sent["kind"]
        assert found["x"][1][1] is None
        for x, y in (
            (found["x"][0], sent["x"][0]),
            (found["x"][1][0], sent["x"][1][0]),
            (found["x"][1][2], sent["x"][1][2]),
            (found["loss"], sent["loss"]),
        ):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert torch.equal(x, y)
            assert x.requires_grad == y.requires_grad
    dist.barrier()
    for end in (sender, receiver):
        if end is not None:
            end.close()
    return schemas


def test_messages_come_whole_and_each_key_is_told_once(workers: WorkerPool) -> None:
    assert workers.run(2, exchange) == [5, 0]


def change_shape(with_key: bool) -> None:
    sender, receiver = open_ends()
    key = "the same" if with_key else None
    if receiver is not None:
        assert receiver.receive(key=key).shape == (3,)
        if not with_key:
            assert receiver.receive(key=key).shape == (4,)
    if sender is not None:
        sender.send(torch.ones(3), key=key)
        if with_key:
            with pytest.raises(
                ValueError, match=r"differ: \(3,\) torch.* in .*\(4,\) torch.*transport='gloo'"
            ):
                sender.send(torch.ones(4), key=key)
        else:
            sender.send(torch.ones(4), key=key)
    dist.barrier()


@pytest.mark.parametrize("with_key", [True, False])
def test_a_changed_shape_is_an_error_or_is_told(workers: WorkerPool, with_key: bool) -> None:
    workers.run(2, change_shape, with_key)


def write_after_sending() -> float:
    sender, receiver = open_ends()
    buffer = torch.zeros(1 << 20)  # more than a socket takes at once
    total = 0.0
    if sender is not None:
        sender.send(buffer[:], key=0)
        buffer += 1
    dist.barrier()
    if receiver is not None:
        total = float(receiver.receive(key=0).sum())
    dist.barrier()
    return total


def test_a_buffer_may_change_once_it_is_sent(workers: WorkerPool) -> None:
    assert workers.run(2, write_after_sending) == [0.0, 0.0]


def wait_in_vain(make_news: Callable[[P2PReceiver], None], error: type[Exception]) -> None:
    sender, receiver = open_ends(timeout_seconds=1.0)
    if sender is not None:
        sender.send(torch.ones(3), key=0)
    dist.barrier()
    if receiver is not None:
        receiver.receive(key=0)
        make_news(receiver)
        start = time.monotonic()
        for _ in range(2):  # the second one at once
            with pytest.raises(error):
                receiver.receive(key=0)
        assert time.monotonic() - start < 5.0
    dist.barrier()


def interrupt_soon(receiver: P2PReceiver) -> None:
    threading.Timer(0.2, receiver.interrupt, [KeyError("the cause")]).start()


def wait_only(_: P2PReceiver) -> None: ...


@pytest.mark.some("interrupt_soon-KeyError")
@pytest.mark.parametrize(
    ("make_news", "error"), [(interrupt_soon, KeyError), (wait_only, TimeoutError)]
)
def test_a_receive_of_a_known_key_ends(
    workers: WorkerPool, make_news: Callable[[P2PReceiver], None], error: type[Exception]
) -> None:
    workers.run(2, wait_in_vain, make_news, error)


def close_channels() -> tuple[int, int]:
    """Returns how many groups are alive after a close, and how many there were."""
    dist.init_process_group("gloo")
    channels = connect([[0, 1]], CPU, 60.0, (0, 1, 1, 0), [(0, 1)], p2p_backend="gloo")
    groups = [weakref.ref(group) for group in (*channels.groups, *channels.p2p_groups)]
    gc.disable()
    channels.close()
    alive = sum(group() is not None for group in groups)
    gc.enable()
    return alive, len(groups)


def test_closed_channels_keep_no_group(workers: WorkerPool) -> None:
    """Five of gloo, one for results, and two for each of two boundaries and one parameter."""
    assert workers.run(2, close_channels) == [(0, 12), (0, 12)]
