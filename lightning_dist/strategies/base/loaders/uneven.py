"""Ranks that have different numbers of batches, none of them dropped or repeated.

A rank that has run out of data runs an empty step beside the others' steps. The loss of the empty
step is zero whatever the weights, so its gradients are zeros, and the rank joins all collectives.
The mean of a step is over the ranks that have data in it. All ranks apply the same update, and each
:class:`ProlongedLoader` is as long as the longest. So Lightning counts as many batches on every
rank, and the end of an epoch needs no correction. torch's ``Join`` shadows the collectives from
outside of the loop instead, and leaves the optimizer of a rank that has ended behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_dist.engine.common.device_group import gather_objects
from lightning_dist.engine.comms.failures.peer_failure import never_destroy
from lightning_dist.engine.data_parallel.missing_gradients import zero_loss
from lightning_dist.strategies.base.loaders.loader_proxy import LoaderProxy


class ProlongedLoader(LoaderProxy):
    """Yields the batches of a loader of known length, and then the last one again and again.

    Attributes:
        position: Place in the epoch of the batch that was yielded last.
    """

    position = -1

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader)
        self._length = length

    @override
    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """Yields the batches of an epoch.

        Raises:
            ValueError: The loader ends before its length.
        """
        own = len(self._loader)
        iterator = iter(self._loader)
        batch: Any = None
        for position in range(self._length):
            if position < own:
                try:
                    batch = next(iterator)
                except StopIteration:
                    raise ValueError(
                        f"The training loader says that it has {own} batches and ended after"
                        f" {position}. uneven_inputs=True relies on its length."
                    ) from None
            self.position = position
            yield batch

    @property
    def has_own_batch(self) -> bool:
        """Whether the batch that was yielded last is not a repetition."""
        return self.position < len(self._loader)


class UnevenInputs:
    """Knows which ranks have data for the batch at hand.

    Attributes:
        loader: The training loader, once it is known.
        step_group: While a step runs, a group of the ranks that have data for it.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._module = module
        self._group = group
        self._timeout = timeout
        self.loader: ProlongedLoader | None = None
        self.step_group: dist.ProcessGroup | None = None
        self._lengths: list[int] = []
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def prolong(self, loader: Any) -> ProlongedLoader:
        """Makes the training loader as long as the longest. Collective: every rank must call it.

        Raises:
            ValueError: On each rank: a loader has no length, no batch, or a state to be resumed.
        """
        own = sized_len(loader), hasattr(loader, "load_state_dict")
        gathered = gather_objects(own, self._group)
        lengths = [length for length, _ in gathered]
        if None in lengths or 0 in lengths:
            raise ValueError(
                f"uneven_inputs=True: the ranks' training loaders have {lengths} batches. Each must"
                " have a length (not None) of at least 1: an epoch is as long as the longest, and"
                " hooks see a rank's last batch again beside the others' further ones. Share the"
                " samples out otherwise, or train on fewer ranks."
            )
        with_state = [rank for rank, (_, has_state) in enumerate(gathered) if has_state]
        if with_state:
            raise ValueError(
                f"uneven_inputs=True: the training loaders of ranks {with_state} have a"
                " `load_state_dict`, by which they would go on inside of an epoch, each where it"
                " was itself. Use loaders without."
            )
        self._lengths = lengths
        # The sets of ranks with data, from all ranks to those with the most batches.
        for position in sorted({0, *lengths})[:-1]:
            ranks = self._present_at(position)
            if ranks not in self._groups:
                places = [dist.get_global_rank(self._group, rank) for rank in ranks]
                self._groups[ranks] = dist.new_group(places, backend="gloo", timeout=self._timeout)
        self.loader = ProlongedLoader(loader, max(lengths))
        return self.loader

    def _present_at(self, position: int) -> tuple[int, ...]:
        return tuple(rank for rank, length in enumerate(self._lengths) if position < length)

    @property
    def _present(self) -> tuple[int, ...]:
        assert self.loader is not None
        return self._present_at(self.loader.position)

    def begin_backward(self, loss: Tensor) -> None:
        """Scales the gradients of a loss: means over all ranks become those of ranks with data."""
        factor = len(self._lengths) / len(self._present)
        loss.register_hook(lambda gradient: gradient * factor)

    def run(
        self,
        ddp: DistributedDataParallel,
        step: Callable[..., Any],
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        """Runs a training step, or an empty one if this rank has no data for it."""
        assert self.loader is not None
        if not self.loader.has_own_batch:
            return ddp(self._zero_loss)
        self.step_group = self._groups[self._present]
        try:
            return ddp(step, *arguments, **keywords)
        finally:
            self.step_group = None

    def _zero_loss(self) -> Tensor:
        return zero_loss([p for p in self._module.parameters() if p.requires_grad])

    def close(self, *, failed: bool) -> None:
        """Releases the loader and the groups; after a failure these must not be destroyed."""
        if failed:
            never_destroy(self._groups.values())
        else:
            for group in self._groups.values():
                dist.destroy_process_group(group)
        self._groups = {}
        self.loader = None
