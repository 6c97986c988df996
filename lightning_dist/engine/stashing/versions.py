"""Versions of a stage's parameters, kept as long as a micro-batch needs them.

A backward of a minibatch runs with the weights that its forward used, while newer ones already
exist (PipeDream: Narayanan et al., SOSP 2019, section 3.3, "weight stashing"). Copying the
parameters at each forward would cost a copy per minibatch and a load at each backward. Here the
forward runs on *aliases*: tensors that share the parameters' memory and are leaves of that
forward's autograd graph. If a micro-batch in flight still uses the present memory when the
optimizer is about to write, the parameters move to a fresh copy. That is copy-on-write: at most one
copy per step, and none on the last stage.

Under vertical sync (the same section) a minibatch uses the same version on each stage. The later
a stage, the newer its weights, so a stage keeps some versions for its next forwards.

Overwriting the memory under a live graph instead would be silently wrong for convolutions and
norms, which save their weights without a version check through ``.data``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensors.dtensor import local_part


def _own_dtype(parameter: nn.Parameter) -> torch.dtype:
    return parameter.dtype


def version_bytes(
    parameters: Iterable[nn.Parameter],
    dtype_of: Callable[[nn.Parameter], torch.dtype] = _own_dtype,
) -> int:
    """Returns the bytes of one version of some weights on this rank.

    Args:
        parameters: The weights; frozen ones, which all versions share, do not count.
        dtype_of: Returns the data type in which a parameter computes.
    """
    trainable = [p for p in parameters if p.requires_grad]
    return sum(local_part(p.detach()).numel() * dtype_of(p).itemsize for p in trainable)


@dataclass(eq=False, slots=True, weakref_slot=True)
class WeightVersion:
    """One version of the weights of a stage.

    Attributes:
        index: Optimizer steps that this version has seen.
        aliases: Leaf tensors by parameter name, in this version's memory; a parameter without an
            alias is used itself.
        num_users: Number of micro-batches in flight on this version.
        copies: Copies of the parameters, for comparisons, if the aliases do not stay.
    """

    index: int
    aliases: Mapping[str, Tensor] = field(default_factory=dict)
    num_users: int = field(default=0)
    copies: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def seen(self) -> Mapping[str, Tensor]:
        """The values that a forward has used, by parameter name."""
        return self.copies or self.aliases


class WeightStore:
    """Returns the newest version to forwards, and keeps the older versions that are in use.

    Args:
        parameters: The stage's parameters with their names, trainable or not.
        max_age: Number of steps by which forwards stay behind the newest version, as soon as there
            were that many since the last :meth:`restart`.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], max_age: int = 0) -> None:
        self._parameters = dict(parameters)
        self._max_age = max_age
        self._aging: deque[WeightVersion] = deque()
        self._num_bytes = version_bytes(self._parameters.values())
        self._current: WeightVersion | None = None
        self._stashed: list[WeightVersion] = []
        self._num_steps = 0
        self._num_copies = 0
        self._peak_stash_bytes = 0

    @property
    def num_steps(self) -> int:
        """Optimizer steps seen: the index of the newest version."""
        return self._num_steps

    @property
    def num_copies(self) -> int:
        """Times that the parameters were copied."""
        return self._num_copies

    @property
    def num_live_versions(self) -> int:
        """Versions whose memory is held, the newest included."""
        return 1 + len(self._stashed)

    @property
    def version_bytes(self) -> int:
        """Bytes of one version."""
        return self._num_bytes

    @property
    def stash_bytes(self) -> int:
        """Bytes held beyond the parameters themselves."""
        return len(self._stashed) * self._num_bytes

    @property
    def peak_stash_bytes(self) -> int:
        """The most that :attr:`stash_bytes` has been."""
        return self._peak_stash_bytes

    def acquire(self) -> WeightVersion:
        """Returns the version for a forward; call :meth:`release` after the backward."""
        version = self._aging[0] if self._aging else self._newest()
        version.num_users += 1
        return version

    def look(self) -> WeightVersion:
        """Returns the weights for a forward that has no backward, so without :meth:`release`."""
        return WeightVersion(self._num_steps)

    def release(self, version: WeightVersion) -> None:
        """Releases a version after the backward that needed it.

        Args:
            version: A version from :meth:`acquire`.
        """
        assert version.num_users > 0
        version.num_users -= 1
        self._drop_if_unused(version)

    @torch.no_grad()
    def before_step(self) -> None:
        """Moves the parameters to fresh memory if a micro-batch in flight uses the present memory.

        Call it right before the optimizer writes. If the optimizer then skips the step, there still
        is a new version, since versions are counted in minibatches.
        """
        if self._max_age > 0:
            self._aging.append(self._newest())
        if len(self._aging) > self._max_age:  # before the copy, so that there is one less
            self._drop_if_unused(self._aging.popleft())
        if self._current is not None and (self._current.num_users > 0 or self._max_age > 0):
            self._stashed.append(self._current)
            self._part_from_current()
            self._peak_stash_bytes = max(self._peak_stash_bytes, self.stash_bytes)
        self._current = None
        self._num_steps += 1

    def restart(self) -> None:
        """Restarts with the newest version, after a drain."""
        while self._aging:
            self._drop_if_unused(self._aging.popleft())

    def _newest(self) -> WeightVersion:
        if self._current is None:
            self._current = WeightVersion(self._num_steps, self._aliases())
        return self._current

    def _aliases(self) -> Mapping[str, Tensor]:
        """Returns the tensors with which the layers compute, by parameter name."""
        return {
            name: p.data.requires_grad_(p.requires_grad) for name, p in self._parameters.items()
        }

    def _part_from_current(self) -> None:
        """Moves the parameters to fresh memory, away from the newest version's."""
        for parameter in self._parameters.values():
            if parameter.requires_grad:
                parameter.data = parameter.data.clone()
        self._num_copies += 1

    def _drop_if_unused(self, version: WeightVersion) -> None:
        is_needed = version.num_users > 0 or version in self._aging
        if not is_needed and version in self._stashed:
            self._stashed.remove(version)
