"""A rank's part in a parameter server: a worker on each rank, and a server on the first ones.

The servers share the parameters out among them, so a push is one message to each server. A worker
reaches the server of its own process through memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_dist.engine.comms.channel import Receiver, Sender
from lightning_dist.engine.comms.gloo_channel import DistributedReceiver, DistributedSender
from lightning_dist.engine.data_parallel.server.messages import Meet, Push, Reply, ServerOptions
from lightning_dist.engine.data_parallel.server.own_stream import OwnStream
from lightning_dist.engine.data_parallel.server.server import ParameterServer
from lightning_dist.engine.data_parallel.server.serving import Serving
from lightning_dist.engine.data_parallel.server.shard import Partition, ShardOptimizer
from lightning_dist.engine.data_parallel.server.stops import Decisions
from lightning_dist.engine.stashing.learning_rates import group_values


class ServerSession:
    """The servers and workers of one training. Collective: every rank must create it.

    The optimizer is that of this rank's whole module. Its state is taken, and it never steps. There
    are two gloo groups of all ranks, for what workers send and for what servers send, whose timeout
    never comes; a worker waits ``timeout_seconds`` for a server.
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
        self.server: ParameterServer | None = None  # of this rank, if it has one
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
        self._of_servers: list[tuple[Sender, Receiver]] = []
        for server in range(options.num_servers):
            if server == self._rank:
                self._of_servers.append(own)
                continue
            receiver = DistributedReceiver(back, server, device, timeout_seconds)
            self._of_servers.append((DistributedSender(there, server), receiver))
        self._decisions = decisions
        self._shares_steps = options.mode == "sync"
        self._served: set[Tensor] = set()
        self._versions: list[tuple[Tensor, int]] = []  # of the weights when they came
        decisions.begin()
        self.is_open = False  # whether weights may have changed since the last drain
        self._follow()

    def open(self) -> None:
        """Takes the module's weights, which hooks may have changed, and begins training."""
        if self.is_open:
            return
        self._follow()
        self._note_versions()
        self.is_open = True
        if self.server is not None:
            with self._stream.in_turn():
                self.server.open()

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Checks that the optimizer of an update is the one that servers have.

        Raises:
            ValueError: It is another one, or has parameters that servers do not have.
        """
        if optimizer is not self._optimizer:
            raise ValueError(
                f"A hook has replaced the optimizer by another {type(optimizer).__name__}, and"
                " servers step with a copy of the one that `configure_optimizers` returned. Change"
                " the values of its groups in place, start another run, or use DDPStrategy."
            )
        groups = optimizer.param_groups
        if not all(self.serves(parameter) for group in groups for parameter in group["params"]):
            raise ValueError(
                "The optimizer has parameters that no server has: a hook has added them between"
                " two batches. Add them in `on_train_epoch_start`, where all workers meet."
            )

    def push(self) -> None:
        """Pushes the gradients of the module, and takes the weights that come back."""
        groups, asked = group_values(self._optimizer), tuple(self._decisions.asked)
        shards = self._partition.shards
        self._check_unwritten()
        replies = self._ask(
            [
                Push([p.grad for p in own], groups, asked, self._written(server))
                for server, own in enumerate(shards)
            ]
        )
        self._install(replies)
        self._decisions.end_update()
        self._decisions.learn(replies[0].due)

    def drain(self) -> None:
        """Waits for all workers, and takes the newest weights; the servers let no push in."""
        if self.is_open:
            self.is_open = False
            servers = range(len(self._of_servers))
            self._check_unwritten()
            self._install(self._ask([Meet(True, self._written(server)) for server in servers]))

    def meet(self) -> tuple[int, ...]:
        """Waits for all workers, and returns the ranks of those that are left."""
        (reply,) = self._ask([Meet(drains=False)])
        self._decisions.learn(reply.due)
        return reply.living

    def _ask(self, requests: Sequence[Push | Meet]) -> list[Reply]:
        pairs = self._of_servers[: len(requests)]
        for (sender, _), request in zip(pairs, requests, strict=True):
            sender.send(request)
        replies: list[Reply] = [receiver.receive() for _, receiver in pairs]
        for reply in replies:
            if reply.failure:
                raise RuntimeError(reply.failure)
        return replies

    @torch.no_grad()
    def _install(self, replies: Sequence[Reply]) -> None:
        for shard, reply in zip(self._partition.shards, replies, strict=True):
            for parameter, weight in zip(shard, reply.weights, strict=True):
                parameter.copy_(weight)
        self._note_versions()

    def _note_versions(self) -> None:
        self._versions = [(p, p._version) for shard in self._partition.shards for p in shard]

    def _check_unwritten(self) -> None:
        if self._shares_steps or all(p._version == version for p, version in self._versions):
            return
        raise ValueError(
            "A hook has written into the weights between two batches. Under"
            " ParameterServerStrategy that works in step only, for otherwise the servers' weights"
            " have gone on meanwhile: use mode='sync', or write where all workers meet, as in"
            " `on_train_epoch_start`."
        )

    def _written(self, server: int) -> list[Tensor]:
        """Returns the weights of this rank's server, into which hooks may have written."""
        is_own = self._shares_steps and server == self._rank
        return [p.detach() for p in self._partition.shards[server]] if is_own else []

    def serves(self, parameter: Tensor) -> bool:
        """Returns whether a parameter is at a server."""
        return parameter in self._served

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
        if self.server is not None:
            self.server.fail(str(error))
        for _, receiver in self._of_servers:
            receiver.interrupt(error)

    def close(self, *, failed: bool) -> None:
        """Closes all channels, and leaves this rank's shard of the state in the optimizer.

        Collective: every sound rank must call it.
        """
        for sender, _ in self._of_servers:
            sender.close(failed=failed)
        if self._serving is not None:
            self._serving.close(failed=failed)
        for _, receiver in self._of_servers:
            receiver.close(failed=failed)
        if self._shard is not None:
            self._shard.lend(self._optimizer)

    def _follow(self) -> None:
        self._partition.extend(self._optimizer)
        self._served.update(*self._partition.shards)
        if self._shard is not None:
            with self._stream.in_turn():
                self._shard.follow(self._optimizer, self._partition.shards[self._rank])
        self._optimizer.state.clear()
