"""What goes wrong with a message is known at both ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_dist.engine.comms import shared_slots
from lightning_dist.engine.comms.channel import ChannelClosedError, PeerLostError
from lightning_dist.engine.comms.receiver import DistributedReceiver
from lightning_dist.engine.comms.sender import DistributedSender
from lightning_dist.engine.comms.shared_ring import AcceptedRing, OfferedRing
from lightning_dist.engine.planning.traffic import MessageCount
from tests.helpers.processes.workers import WorkerPool


@contextmanager
def only_sockets() -> Iterator[None]:
    with mock.patch.object(shared_slots, "can_make_files", return_value=False):
        yield


def send_two(group: dist.ProcessGroup) -> None:
    with only_sockets():
        sender = DistributedSender(group, 1)
    sender.send(torch.ones(96, dtype=torch.float64))
    dist.barrier()
    time.sleep(0.3)  # until then the receiver has posted what it expects next
    send, calls = dist.isend, 0

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return send(*args, **kwargs)

    with mock.patch.object(dist, "isend", interrupted), pytest.raises(KeyboardInterrupt):
        sender.send(torch.ones(48, dtype=torch.float64))  # which must be announced first
    sender.close()


def send_two_through_memory(group: dist.ProcessGroup) -> None:
    sender = DistributedSender(group, 1)
    sender.send(torch.ones(96, dtype=torch.float64))
    dist.barrier()  # the offer has been accepted
    with (
        mock.patch.object(shared_slots, "fill", side_effect=KeyboardInterrupt) as fill,
        pytest.raises(KeyboardInterrupt),
    ):
        sender.send(torch.ones(96, dtype=torch.float64))
    assert fill.call_count == 1
    with pytest.raises(PeerLostError):
        sender.send(torch.ones(96, dtype=torch.float64))
    sender.close()


def receive_one(group: dist.ProcessGroup) -> None:
    receiver = DistributedReceiver(group, 0, torch.device("cpu"), timeout_seconds=1.0)
    assert float(receiver.receive().sum()) == 96
    dist.barrier()
    with pytest.raises(TimeoutError):
        receiver.receive()


def run(send: Callable[[dist.ProcessGroup], None]) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(days=1))
    (receive_one if dist.get_rank() else send)(group)
    dist.barrier()


@pytest.mark.parametrize("send", [send_two, send_two_through_memory])
def test_half_a_message_is_the_last(
    workers: WorkerPool, send: Callable[[dist.ProcessGroup], None]
) -> None:
    workers.run(2, run, send)


NUM_MESSAGES = 60


def message(number: int) -> dict[str, Any]:
    """Of one size for a while, and then larger; without tensors now and then."""
    size = (1 + number // 20) * 3000
    tensor = torch.full((size,), number, dtype=torch.float64, requires_grad=number % 2 == 0)
    return {"number": number, "x": [] if number % 7 == 3 else [tensor, tensor.detach() + 1]}


def exchange(refused_by: int | None) -> int:
    """Sends without and with a receiver that keeps up, and gives how many went through memory."""
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(days=1))
    messages = [message(number) for number in range(NUM_MESSAGES)]
    if dist.get_rank() == 0:
        with only_sockets() if refused_by == 0 else nullcontext():
            in_memory = MessageCount()
            sender = DistributedSender(group, 1, in_memory)
        with mock.patch.object(OfferedRing, "hand_over", autospec=True) as hand_over:
            hand_over.side_effect = HAND_OVER
            for number, sent in enumerate(messages):
                if number in {1, 30}:
                    dist.barrier()
                sender.send(sent, port=number % 3)
            dist.barrier()
            count = hand_over.call_count
            assert in_memory.count == count
        sender.close()
        return count
    with mock.patch.object(AcceptedRing, "accept", return_value=None) if refused_by else QUIET:
        receiver = DistributedReceiver(group, 0, torch.device("cpu"), timeout_seconds=5.0)
        for number, sent in enumerate(messages):
            if number == 30:
                dist.barrier()
                dist.barrier()  # all are on their way, and the ring is full
            found = receiver.receive(port=number % 3)
            assert found["number"] == number
            for x, y in zip(found["x"], sent["x"], strict=True):
                assert torch.equal(x, y)
                assert x.requires_grad == y.requires_grad
            if number == 0:
                dist.barrier()
        with pytest.raises(ChannelClosedError):
            receiver.receive()
    return 0


HAND_OVER = OfferedRing.hand_over
QUIET: AbstractContextManager[None] = nullcontext()


@pytest.mark.parametrize(("refused_by", "fewest", "most"), [(None, 20, 50), (0, 0, 0), (1, 0, 0)])
def test_messages_come_whole_and_in_order_by_either_way(
    workers: WorkerPool, refused_by: int | None, fewest: int, most: int
) -> None:
    num_shared, _ = workers.run(2, exchange, refused_by)
    assert fewest <= num_shared <= most


def refuse(text: str) -> Any:
    raise ValueError(text)


class Unreadable:
    """Leaves its process well, and fails wherever it comes to."""

    def __reduce__(self) -> Any:
        return refuse, ("this one takes no such thing",)


def send_unreadable() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(days=1))
    if dist.get_rank() == 0:
        DistributedSender(group, 1).send(Unreadable())
    else:
        receiver = DistributedReceiver(group, 0, torch.device("cpu"), timeout_seconds=5.0)
        for _ in range(2):
            with pytest.raises(ValueError, match="this one takes no such thing"):
                receiver.receive()
    dist.barrier()


def test_what_cannot_be_read_is_an_error_where_it_is_awaited(workers: WorkerPool) -> None:
    workers.run(2, send_unreadable)
