"""What goes wrong with a message is known at both ends."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.engine.comms.channel import ChannelClosedError, TensorInfo
from lightning_dist.engine.comms.connect import connect
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from tests.helpers.processes.workers import WorkerPool


def send_two(group: dist.ProcessGroup) -> None:
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


def receive_one(group: dist.ProcessGroup) -> None:
    receiver = DistributedReceiver(group, 0, torch.device("cpu"), timeout_seconds=1.0)
    assert float(receiver.receive().sum()) == 96
    dist.barrier()
    with pytest.raises(TimeoutError):
        receiver.receive()


def run() -> None:
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(days=1))
    (receive_one if dist.get_rank() else send_two)(group)
    dist.barrier()


def test_half_a_message_is_the_last(workers: WorkerPool) -> None:
    workers.run(2, run)


NUM_MESSAGES = 60


def message(number: int) -> dict[str, Any]:
    """Of one size for a while, and then larger; without tensors now and then."""
    size = (1 + number // 20) * 3000
    tensor = torch.full((size,), number, dtype=torch.float64, requires_grad=number % 2 == 0)
    return {"number": number, "x": [] if number % 7 == 3 else [tensor, tensor.detach() + 1]}


def exchange() -> None:
    """Sends without and with a receiver that keeps up."""
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(days=1))
    messages = [message(number) for number in range(NUM_MESSAGES)]
    if dist.get_rank() == 0:
        sender = DistributedSender(group, 1)
        for number, sent in enumerate(messages):
            if number == 30:
                dist.barrier()
            sender.send(sent, tag=number % 3)
        dist.barrier()
        sender.close()
        return
    receiver = DistributedReceiver(group, 0, torch.device("cpu"), timeout_seconds=5.0)
    for number, sent in enumerate(messages):
        if number == 30:
            dist.barrier()
            dist.barrier()  # all are on their way
        found = receiver.receive(tag=number % 3)
        assert found["number"] == number
        for x, y in zip(found["x"], sent["x"], strict=True):
            assert torch.equal(x, y)
            assert x.requires_grad == y.requires_grad
    with pytest.raises(ChannelClosedError):
        receiver.receive()


def test_messages_come_whole_and_in_order(workers: WorkerPool) -> None:
    workers.run(2, exchange)


def exchange_of_two_devices() -> None:
    """With a receiver on a device that stands for a GPU, to which only some tensors belong."""
    dist.init_process_group("gloo")
    group = dist.new_group(timeout=timedelta(days=1))
    if dist.get_rank() == 0:
        own = TensorInfo.of

        def as_on_a_gpu(tensor: Tensor) -> TensorInfo:
            return replace(own(tensor), is_on_host=tensor.dtype == torch.int64)

        with mock.patch.object(TensorInfo, "of", as_on_a_gpu):
            DistributedSender(group, 1).send({"x": torch.ones(3), "lengths": torch.arange(3)})
    else:
        found = DistributedReceiver(group, 0, torch.device("meta"), timeout_seconds=5.0).receive()
        assert found["x"].is_meta
        assert found["lengths"].tolist() == [0, 1, 2]
    dist.barrier()


def test_what_is_sent_from_the_host_stays_there(workers: WorkerPool) -> None:
    workers.run(2, exchange_of_two_devices)


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


def close_channels() -> int:
    dist.init_process_group("gloo")
    with pytest.raises(ValueError, match=r"leave out the ranks \[1\] of the world"):
        connect([[0]], torch.device("cpu"), 60.0)
    channels = connect([[0, 1]], torch.device("cpu"), 60.0)
    groups = [weakref.ref(group) for group in channels.groups]
    gc.disable()
    channels.close()
    alive = sum(group() is not None for group in groups)
    gc.enable()
    return alive


def test_closed_channels_keep_no_group(workers: WorkerPool) -> None:
    """A group in a reference cycle may be freed in a forked loader's process, which it crashes."""
    assert workers.run(2, close_channels) == [0, 0]
