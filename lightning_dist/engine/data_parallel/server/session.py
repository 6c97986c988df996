"""A rank's part in a parameter server: its worker, and its server if it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_dist.engine.comms.channel import MemoryChannel, Receiver, Sender
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.data_parallel.server.messages import ServerOptions
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
        shard: Its weights and their optimizer.
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
        self.shard: ShardOptimizer | None = None
        self._serving: Serving | None = None
        self.server: ParameterServer | None = None
        there, back = groups
        own = MemoryChannel(), MemoryChannel()
        if self._rank < options.num_servers:
            workers = range(dist.get_world_size())
            self.shard = ShardOptimizer(optimizer)
            self.server = ParameterServer(self.shard, options, workers)
            of_workers: dict[int, tuple[Receiver, Sender]] = {self._rank: own}
            for worker in set(workers) - {self._rank}:
                receiver = DistributedReceiver(there, worker, device, timeout_seconds=None)
                of_workers[worker] = receiver, DistributedSender(back, worker)
            outlives = options.mode == "async"
            self._serving = Serving(self.server, self._rank, of_workers, outlives_workers=outlives)
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
            self.server.open()

    def reload(self) -> None:
        """Takes the state that was loaded into the optimizer."""
        if self.shard is not None:
            self.shard.reload(self._optimizer, self._partition.shards[self._rank])
        self._optimizer.state.clear()

    def interrupt(self, error: BaseException) -> None:
        """Raises an error where this worker waits, and ends the waits of others for each other."""
        if self._serving is not None:
            self._serving.interrupt(error)
        self.worker.interrupt(error)

    def close(self, *, failed: bool) -> None:
        """Closes all channels; the state stays. Collective: every sound rank must call it."""
        self.worker.close(failed=failed)
        if self._serving is not None:
            self._serving.close(failed=failed)
        self.worker.close_receivers(failed=failed)

    def _follow(self) -> None:
        self._partition.extend(self._optimizer)
        if self.shard is not None:
            self.shard.follow(self._optimizer, self._partition.shards[self._rank])
        self._optimizer.state.clear()


def merge_states(
    parts: Sequence[tuple[dict[Any, Any], list[dict[str, Any]]]], whole: dict[str, Any]
) -> dict[str, Any]:
    """Merges the states of all servers with a worker's state dict, which has the rest."""
    groups = zip(whole["param_groups"], parts[0][1], strict=True)
    return {
        **whole,
        "state": {key: values for state, _ in reversed(parts) for key, values in state.items()},
        "param_groups": [{**group, **own} for group, own in groups],
    }
