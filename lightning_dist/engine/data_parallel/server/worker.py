"""A worker's end: what it pushes to all servers, and the weights that come back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.data_parallel.server.messages import Meet, Push, Reply
from lightning_dist.engine.data_parallel.server.shard import Partition
from lightning_dist.engine.data_parallel.server.stops import Decisions
from lightning_dist.engine.stashing.learning_rates import group_values

Channels = Sequence[tuple[Sender, Receiver]]
"""To each server, and back."""


class Worker:
    """A worker between its module and the servers.

    Args:
        partition: Which server has which parameters of this rank's module.
        channels: Those of each server.
        decisions: What this worker asks all workers for.

    Attributes:
        is_open: Whether weights may have changed since the last drain.
    """

    def __init__(self, partition: Partition, channels: Channels, decisions: Decisions) -> None:
        self._partition = partition
        self._channels = channels
        self._decisions = decisions
        self.is_open = False

    def push(self, optimizer: Optimizer) -> None:
        """Pushes the gradients of the module, and takes the weights that come back."""
        groups, asked = group_values(optimizer), tuple(self._decisions.asked)
        shards = self._partition.shards
        replies = self._ask([Push([p.grad for p in own], groups, asked) for own in shards])
        self._install(replies)
        self._decisions.end_update()
        self._decisions.learn(replies[0].due)

    def drain(self) -> None:
        """Waits for all workers, and takes the newest weights; the servers let no push in."""
        if self.is_open:
            self.is_open = False
            self._install(self._ask([Meet(drains=True)] * len(self._channels)))

    def meet(self) -> tuple[int, ...]:
        """Waits for all workers, and returns the ranks of those that are left."""
        (reply,) = self._ask([Meet(drains=False)])
        self._decisions.learn(reply.due)
        return reply.living

    def interrupt(self, error: BaseException) -> None:
        """Raises an error where this worker waits for a server."""
        for _, receiver in self._channels:
            receiver.interrupt(error)

    def close(self, *, failed: bool) -> None:
        """Says goodbye to the servers."""
        for sender, _ in self._channels:
            sender.close(failed=failed)

    def close_receivers(self, *, failed: bool) -> None:
        """Waits until the servers have said goodbye."""
        for _, receiver in self._channels:
            receiver.close(failed=failed)

    def _ask(self, requests: Sequence[Push | Meet]) -> list[Reply]:
        for (sender, _), request in zip(self._channels, requests, strict=False):
            sender.send(request)
        replies: list[Reply] = [
            receiver.receive() for (_, receiver), _ in zip(self._channels, requests, strict=False)
        ]
        for reply in replies:
            if reply.failure:
                raise RuntimeError(reply.failure)
        return replies

    @torch.no_grad()
    def _install(self, replies: Sequence[Reply]) -> None:
        for shard, reply in zip(self._partition.shards, replies, strict=True):
            _copy(shard, reply)


def _copy(shard: Sequence[nn.Parameter], reply: Reply) -> None:
    for parameter, weight in zip(shard, reply.weights, strict=True):
        parameter.copy_(weight)
