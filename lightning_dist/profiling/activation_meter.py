"""Count what forwards keep for their backwards, and the most of it at a time.

Autograd hands over each tensor that it keeps, and drops what it got in return when it needs it no
more. Tensors on the same memory count once, and parameters, which are there anyway, not at all.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_dist.shards import local_part


class ActivationMeter:
    """Watches what is kept while it is entered, and afterwards until it is dropped.

    Args:
        parameters: Whose memory does not count.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._own = {local_part(p.detach()).untyped_storage().data_ptr() for p in parameters}
        self._users: dict[int, int] = {}
        self._hooks = saved_tensors_hooks(self._pack, lambda kept: kept.tensor)
        self.num_bytes = 0
        self.peak_bytes = 0
        self.total_bytes = 0

    def __enter__(self) -> ActivationMeter:
        """Begins."""
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends; what is kept is still watched."""
        self._hooks.__exit__()

    def _pack(self, tensor: Tensor) -> _Kept:
        # What is handed back must not be the tensor itself, which would hold its own graph.
        place = tensor.untyped_storage().data_ptr()
        base = tensor if tensor._base is None else tensor._base
        if place in self._own or isinstance(base, nn.Parameter):
            return _Kept(tensor.detach(), None)
        return _Kept(tensor.detach(), _Claim(self, place, tensor.untyped_storage().nbytes()))

    def claim(self, place: int, num_bytes: int) -> None:
        """Counts one more user of some memory.

        Args:
            place: Its address.
            num_bytes: Its size.
        """
        users = self._users.get(place, 0)
        self._users[place] = users + 1
        if not users:
            self.num_bytes += num_bytes
            self.total_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)

    def drop(self, place: int, num_bytes: int) -> None:
        """Counts one user less of some memory.

        Args:
            place: Its address.
            num_bytes: Its size.
        """
        self._users[place] -= 1
        if not self._users[place]:
            del self._users[place]
            self.num_bytes -= num_bytes


class _Claim:
    """One tensor's share in some memory, for as long as it lives."""

    def __init__(self, meter: ActivationMeter, place: int, num_bytes: int) -> None:
        self._meter = meter
        self._memory = (place, num_bytes)
        meter.claim(*self._memory)

    def __del__(self) -> None:
        self._meter.drop(*self._memory)


class _Kept:
    """What autograd holds in the place of a tensor."""

    def __init__(self, tensor: Tensor, claim: _Claim | None) -> None:
        self.tensor = tensor
        self._claim = claim
