"""Both ends of a channel whose tensors travel point to point, on the device's own backend.

Nothing is copied and nothing is packed: each tensor goes from the sender's memory to the receiver's
by ``torch.distributed``'s ``batch_isend_irecv``, over NCCL between GPUs. The same code runs over
gloo with CPU tensors, where all of its semantics are tested.

The receiver must know a message's shapes before it comes, and must not wait for the sender to tell.
Both ends know the *key* of a message: the shapes of its micro-batch. The first message of a key is
preceded by its schema, over a control channel of the host. Later ones of that key come without. The
first activation of each batch has no key, and so comes with its schema: only its sender knows which
tensors need a gradient by now.

A communicator runs its operations in order. Two stages send to each other in both directions, and
two ranks may have several stages, whose messages come in another order than they were sent. So each
communicator has one direction and one use: the sends of one stage to another. The stage must
receive them in the order of the sends, which :func:`.lower` sees to. No schedule can deadlock then.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_dist.engine.comms.channel import PeerLostError, Receiver, Sender, TensorInfo
from lightning_dist.engine.comms.in_flight import (
    HostIntake,
    HostOutbox,
    Posted,
    StreamIntake,
    StreamOutbox,
)
from lightning_dist.engine.tensors.tree import flatten, pickle_skeleton, unflatten


class P2PSender(Sender):
    """Sends trees to one rank; no tensor may be written to until it has been sent.

    Schemas go over the control channel to the same rank. With ``copies_leaves`` it copies tensors
    without a graph, which may be a module's buffers and change before they have been sent.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        control: Sender,
        *,
        copies_leaves: bool = False,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer
        self._device = device
        self._control = control
        self._copies_leaves = copies_leaves
        self._schemas: dict[Hashable, bytes] = {}
        self._outbox = HostOutbox(peer) if device.type == "cpu" else StreamOutbox()

    @override
    def send(self, tree: Any, *, tag: int = 0, key: Hashable = None) -> None:
        """Sends a tree.

        Raises:
            PeerLostError: The receiver is gone.
            ValueError: An earlier tree of this key had other shapes.
        """
        found, skeleton = flatten(tree)
        infos = [TensorInfo.of(tensor) for tensor in found]
        schema = pickle_skeleton((skeleton, infos))
        known = None if key is None else self._schemas.get(key)
        if known is None:
            self._control.send(schema, tag=tag)
            if key is not None:
                self._schemas[key] = schema
        elif known != schema:
            raise _changed_schema(pickle.loads(known), (skeleton, infos))
        tensors = [self._ready(tensor) for tensor in found]
        self._outbox.check()
        assert self._group is not None, "the channel is closed"
        try:
            works = _begin(dist.isend, tensors, self._peer, self._group)
        except RuntimeError as error:
            raise PeerLostError(f"Rank {self._peer} cannot be reached: {error}") from error
        self._outbox.keep(works, tensors)

    def _ready(self, tensor: Tensor) -> Tensor:
        if self._copies_leaves and tensor.is_leaf:
            tensor = tensor.detach().clone()
        return tensor.detach().to(self._device, non_blocking=True).contiguous()

    @override
    def close(self, *, failed: bool = False) -> None:
        if self._group is not None and not failed:
            self._outbox.close()
        # Kept in a reference cycle, a group could be freed in a forked process.
        self._group = None
        self._control.close(failed=failed)


class P2PReceiver(Receiver):
    """Receives what :class:`P2PSender` sends, in that order, whatever the tags.

    On an accelerator the current stream waits, and the group's own timeout counts. Else times are
    those of :class:`.Inbox`. Tensors that were sent from the host come back there.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        timeout_seconds: float | None,
        control: Receiver,
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._peer = peer
        self._device = device
        self._control = control
        self._schemas: dict[Hashable, tuple[Any, list[TensorInfo]]] = {}
        is_host = device.type == "cpu"
        self._intake = HostIntake(peer, timeout_seconds) if is_host else StreamIntake(device)

    @override
    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        schema = self._schemas.get(key)
        if schema is None:
            schema = pickle.loads(self._control.receive(tag=tag))
            if key is not None:
                self._schemas[key] = schema
        skeleton, infos = schema
        taken = self._intake.take(lambda: self._post(infos))
        tensors = [
            (tensor.cpu() if info.is_on_host else tensor).requires_grad_(info.requires_grad)
            for tensor, info in zip(taken, infos, strict=True)
        ]
        return unflatten(tensors, skeleton)

    @override
    def interrupt(self, error: BaseException) -> None:
        self._control.interrupt(error)
        self._intake.interrupt(error)

    @override
    def close(self, *, failed: bool = False) -> None:
        self._intake.close(failed=failed)
        self._group = None
        self._control.close(failed=failed)

    def _post(self, infos: Sequence[TensorInfo]) -> Posted:
        assert self._group is not None, "the channel is closed"
        tensors = [torch.empty(i.shape, dtype=i.dtype, device=self._device) for i in infos]
        try:
            return _begin(dist.irecv, tensors, self._peer, self._group), tensors
        except RuntimeError as error:
            lost = f"The connection to rank {self._peer} broke: {error}"
            raise PeerLostError(lost) from error


def connect_ends(group: dist.ProcessGroup, sender: int, device: torch.device) -> None:
    """Sends the first message of a group of two. Collective: both of its ranks must call it.

    A backend may connect two ranks with their first message, for which both wait.
    """
    message = torch.zeros(1, dtype=torch.uint8, device=device)
    (receiver,) = (rank for rank in dist.get_process_group_ranks(group) if rank != sender)
    if dist.get_rank() == sender:
        works = _begin(dist.isend, [message], receiver, group)
    else:
        works = _begin(dist.irecv, [message], sender, group)
    for work in works:
        work.wait()


def _begin(
    operation: Callable[..., Any], tensors: Sequence[Tensor], peer: int, group: dist.ProcessGroup
) -> list[dist.Work]:
    """Begins the sends, or the receives, of contiguous tensors as one launch."""
    # As bytes, for a backend need not know each data type. A tensor without values is not sent.
    parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    operations = [dist.P2POp(operation, part, peer, group) for part in parts]
    return dist.batch_isend_irecv(operations) if operations else []


def _changed_schema(before: object, now: object) -> ValueError:
    return ValueError(
        "A stage has sent two micro-batches whose inputs have the same shapes, but whose"
        f" activations or gradients differ: {_describe(before)} before, {_describe(now)} now. The"
        " next stage has to know shapes before a tensor comes. Let shapes depend on the batch's"
        " shapes only, and each loss on the model's outputs (`output.sum() * 0.0` in place of a"
        " constant), or pass transport='gloo', which sends the shapes along."
    )


def _describe(schema: Any) -> str:
    skeleton, infos = schema
    told = (f"{i.shape} {i.dtype}{' with grad' if i.requires_grad else ''}" for i in infos)
    tensors = ", ".join(told) or "no tensors"
    return f"{tensors} in {skeleton!r}"


GroupKey = tuple[int, int]
"""Any two numbers that name a communicator: the sending stage and the receiving one, say."""
