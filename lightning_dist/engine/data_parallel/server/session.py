"""A rank's part in a parameter server: its worker, and its server if it has one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.data_parallel.server.messages import ServerOptions
from lightning_dist.engine.data_parallel.server.own_stream import OwnStream
from lightning_dist.engine.data_parallel.server.server import ParameterServer
from lightning_dist.engine.data_parallel.server.serving import Serving
from lightning_dist.engine.data_parallel.server.shard import Partition, ShardOptimizer
from lightning_dist.engine.data_parallel.server.stops import Decisions
from lightning_dist.engine.data_parallel.server.worker import Worker


class ServerSession:
    """The servers and workers of one training. Collective: every rank must create it.

    Args:
        options: How servers treat what is pushed.
        optimizer: The optimizer of this rank's whole module, whose state is taken; it never steps.
        groups: Gloo groups of all ranks whose timeout never comes: for what workers send, and for
            what servers send.
        device: Device of the weights.
        timeout_seconds: How long a worker waits for a server.
        decisions: What this worker asks all workers for.

    Attributes:
        worker: This rank's worker.
        server: This rank's server; None without one.
    """

    def __init__(
        self,
        options: ServerOptions,
        optimizer: Optimizer,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        timeout_seconds: float,
        decisions: Decisions,
    ) -> None:
        self._rank, self._optimizer = dist.get_rank(), optimizer
        self._partition = Partition(options.num_servers)
        self._shard: ShardOptimizer | None = None
        self._serving: Serving | None = None
        self.server: ParameterServer | None = None
        there, back = groups
        self._stream = OwnStream(device)
        own = self._stream.channel(), self._stream.channel()
        if self._rank < options.num_servers:
            workers = range(dist.get_world_size())
            self._shard = ShardOptimizer(optimizer)
            self.server = ParameterServer(self._shard, options, workers)
            of_workers: dict[int, tuple[Receiver, Sender]] = {self._rank: own}
            for worker in set(workers) - {self._rank}:
                # A worker's goodbye is no failure, whose cause would have to be awaited. What it
                # pushes goes to the device on the server's stream.
                receiver = DistributedReceiver(
                    there, worker, torch.device("cpu"), timeout_seconds=None, cause_seconds=0.0
                )
                of_workers[worker] = receiver, DistributedSender(back, worker)
            outlives = options.mode == "async"
            self._serving = Serving(
                self.server, self._rank, of_workers, self._stream, outlives_workers=outlives
            )
        of_servers: list[tuple[Sender, Receiver]] = []
        for server in range(options.num_servers):
            if server == self._rank:
                of_servers.append(own)
                continue
            receiver = DistributedReceiver(back, server, device, timeout_seconds)
            of_servers.append((DistributedSender(there, server), receiver))
        decisions.begin()
        self.worker = Worker(self._partition, of_servers, decisions)
        self._follow()

    def open(self) -> None:
        """Takes the module's weights, which hooks may have changed, and begins training."""
        if self.worker.is_open:
            return
        self._follow()
        self.worker.is_open = True
        if self.server is not None:
            with self._stream.in_turn():
                self.server.open()

    @property
    def own_values(self) -> list[dict[str, Any]] | None:
        """The values of groups that this rank's server has; None without one."""
        return None if self._shard is None else self._shard.own_values

    def reload(self) -> None:
        """Takes the state that was loaded into the optimizer."""
        if self._shard is not None:
            with self._stream.in_turn():
                self._shard.reload(self._optimizer, self._partition.shards[self._rank])
        self._optimizer.state.clear()

    @contextmanager
    def lent_state(self) -> Iterator[None]:
        """Returns a context manager that shows this rank's shard in the optimizer."""
        if self._shard is not None:
            self._shard.lend(self._optimizer)
        yield
        self._optimizer.state.clear()

    def interrupt(self, error: BaseException) -> None:
        """Raises an error where this worker waits, and ends the waits of others for each other."""
        if self._serving is not None:
            self._serving.interrupt(error)
        self.worker.interrupt(error)

    def close(self, *, failed: bool) -> None:
        """Closes all channels, and leaves this rank's shard of the state in the optimizer.

        Collective: every sound rank must call it.
        """
        self.worker.close(failed=failed)
        if self._serving is not None:
            self._serving.close(failed=failed)
        self.worker.close_receivers(failed=failed)
        if self._shard is not None:
            self._shard.lend(self._optimizer)

    def _follow(self) -> None:
        self._partition.extend(self._optimizer)
        if self._shard is not None:
            with self._stream.in_turn():
                self._shard.follow(self._optimizer, self._partition.shards[self._rank])
        self._optimizer.state.clear()
