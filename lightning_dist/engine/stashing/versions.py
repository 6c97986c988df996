"""Versions of a stage's parameters, kept as long as a micro-batch needs them.

A backward of a batch runs with the weights that its forward used, while newer ones already
exist (PipeDream: Narayanan et al., SOSP 2019, section 3.3). The forward runs on *aliases*: tensors
that share the parameters' memory and are leaves of its autograd graph. If a micro-batch in flight
uses the present memory when the optimizer is about to write, the parameters move to a fresh copy:
at most one copy per step, and none on the last stage. So they do behind a batch that only fills the
pipeline, since hooks may write there, too. Overwriting the memory under a live graph would be
silently wrong for convolutions and norms.

Under vertical sync (the same section) a batch uses the same version on each stage. The later a
stage, the newer its weights, so a stage keeps some versions for its next forwards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_dist.engine.tensors.dtensor import local_part
from lightning_dist.engine.tensors.patch import replaced

T = TypeVar("T")


def version_bytes(
    parameters: Iterable[nn.Parameter],
    dtype_of: Callable[[nn.Parameter], torch.dtype] = lambda parameter: parameter.dtype,
) -> int:
    """Returns the bytes of one version of some weights on this rank.

    Frozen ones, which all versions share, do not count. ``dtype_of`` returns the data type in which
    a parameter computes.
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
        origin: The version with the same memory whose users count, if it is another one.
    """

    index: int
    aliases: Mapping[str, Tensor] = field(default_factory=dict)
    num_users: int = 0
    copies: Mapping[str, Tensor] = field(default_factory=dict)
    origin: WeightVersion | None = None

    @property
    def seen(self) -> Mapping[str, Tensor]:
        """The values that a forward has used, by parameter name."""
        return self.copies or self.aliases


class ComputeWeights:
    """The weights with which a stage's layers compute: the parameters themselves, by aliases.

    Args:
        parameters: The stage's parameters with their names, trainable or not.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.parameters = dict(parameters)

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """Returns the data type in which a parameter computes."""
        return parameter.dtype

    def num_bytes(self) -> int:
        """Counts the bytes of one version, as of now: users freeze and thaw parameters."""
        return version_bytes(self.parameters.values(), self.dtype_of)

    def aliases(self) -> Mapping[str, Tensor]:
        """Returns the leaves of a new version, by parameter name."""
        return {name: p.data.requires_grad_(p.requires_grad) for name, p in self.parameters.items()}

    def again(self, alias: Tensor, parameter: nn.Parameter) -> Tensor:
        """Returns another alias of a parameter that was frozen or unfrozen, maybe."""
        return alias.detach().requires_grad_(parameter.requires_grad)

    def look(self) -> Mapping[str, Tensor]:
        """Returns aliases for a forward without a backward; none mean the parameters themselves."""
        return {}

    def leave(self) -> None:
        """Moves the parameters to fresh memory, away from the newest version's."""
        for parameter in self.parameters.values():
            # One that was frozen lately may have a gradient of a batch before.
            if parameter.requires_grad or parameter.grad is not None:
                parameter.data = parameter.data.clone()

    def before_step(self) -> None:
        """Prepares for the optimizer's writes; call it right before them."""

    def restart(self) -> None:
        """Restarts with no micro-batch in flight."""


class WeightPolicy(ABC):
    """Decides which weights the micro-batches of a stage see; see :func:`.choose_policy`.

    Attributes:
        recomputes: Whether a backward runs the layers again, on other weights than its forward's.
        num_steps: Optimizer steps seen: the index of the newest version.
        peak_stash_bytes: The most that :attr:`stash_bytes` has been.
    """

    recomputes = False

    def __init__(self, weights: ComputeWeights) -> None:
        self._weights = weights
        self.num_steps = 0
        self.peak_stash_bytes = 0

    @property
    def version_bytes(self) -> int:
        """Bytes of one version beyond the parameters."""
        return 0

    @property
    def stash_bytes(self) -> int:
        """Bytes held beyond the parameters."""
        return 0

    @abstractmethod
    def acquire(self) -> WeightVersion:
        """Returns the weights for a forward; no aliases mean the parameters themselves."""

    def look(self) -> WeightVersion:
        """Returns the newest weights, for a forward without a backward, so without a release."""
        return WeightVersion(self.num_steps, self._weights.look())

    def release(self, version: WeightVersion) -> None:
        """Releases weights from :meth:`acquire` after the backward that needed them."""
        del version

    def before_step(self) -> None:
        """Prepares for the optimizer's writes; call it right before them.

        If the optimizer then skips the step, there still is a new version, since versions are
        counted in batches.
        """
        self._weights.before_step()
        self.num_steps += 1

    def protect_versions(self) -> None:  # noqa: B027
        """Keeps versions in use from what hooks write behind a batch without a step."""

    def restart(self) -> None:
        """Restarts with no micro-batch in flight, after a drain."""
        self._weights.restart()


class Stashed(WeightPolicy):
    """Returns the newest version to forwards, and keeps the older versions that are in use.

    Args:
        weights: The weights of the stage.
        max_age: Number of steps by which forwards stay behind the newest version, as soon as there
            were that many since the last :meth:`restart`.
    """

    def __init__(self, weights: ComputeWeights, max_age: int = 0) -> None:
        super().__init__(weights)
        self._num_bytes = weights.num_bytes()
        self._max_age = max_age
        self._aging: deque[WeightVersion] = deque()
        self._current: WeightVersion | None = None
        self._stashed: list[WeightVersion] = []

    @property
    @override
    def version_bytes(self) -> int:
        return self._num_bytes

    @property
    @override
    def stash_bytes(self) -> int:
        return len(self._stashed) * self._num_bytes

    @override
    def acquire(self) -> WeightVersion:
        version = self._aging[0] if self._aging else self._newest()
        version.num_users += 1
        return self._as_trained(version)

    @override
    def release(self, version: WeightVersion) -> None:
        version = version.origin or version
        assert version.num_users > 0
        version.num_users -= 1
        self._drop_if_unused(version)

    @override
    @torch.no_grad()
    def before_step(self) -> None:
        """Moves the parameters to fresh memory if a micro-batch in flight uses the present one."""
        if self._max_age > 0:
            self._aging.append(self._newest())
        if len(self._aging) > self._max_age:  # before the copy, so that there is one less
            self._drop_if_unused(self._aging.popleft())
        self._stash_current(is_used=self._max_age > 0)
        super().before_step()

    @override
    @torch.no_grad()
    def protect_versions(self) -> None:
        self._stash_current()

    @override
    def restart(self) -> None:
        super().restart()
        while self._aging:
            self._drop_if_unused(self._aging.popleft())
        if self._current is not None and not self._current.num_users:
            self._current = None  # casts do not show what other code may write to the masters

    def _newest(self) -> WeightVersion:
        if self._current is None:
            self._current = WeightVersion(self.num_steps, self._weights.aliases())
        return self._current

    def _stash_current(self, *, is_used: bool = False) -> None:
        current, self._current = self._current, None
        if current is not None and (current.num_users > 0 or is_used):
            self._stashed.append(current)
            self._weights.leave()
            self.peak_stash_bytes = max(self.peak_stash_bytes, self.stash_bytes)

    def _as_trained(self, version: WeightVersion) -> WeightVersion:
        """Returns a version whose aliases need gradients where the parameters do by now."""
        own, before = self._weights.parameters, version.aliases
        if all(alias.requires_grad == own[name].requires_grad for name, alias in before.items()):
            return version
        # The graphs of micro-batches in flight keep the aliases that they have.
        aliases = {name: self._weights.again(alias, own[name]) for name, alias in before.items()}
        return WeightVersion(version.index, aliases, origin=version)

    def _drop_if_unused(self, version: WeightVersion) -> None:
        is_needed = version.num_users > 0 or version in self._aging
        if not is_needed and version in self._stashed:
            self._stashed.remove(version)


class SwappedWeights:
    """Swaps the weights of layers for those of a version, in forwards and in backwards.

    In a backward, layers that recompute their activations (``torch.utils.checkpoint``) read their
    weights again, when the optimizer has written newer ones. The user's step sees the same weights:
    what it computes from a parameter itself, such as a penalty, adds to that version's gradient.

    Args:
        layers: Layers of a stage.
        root: A module that contains them; its other modules with the same parameters get the
            version's weights as well.
    """

    def __init__(self, layers: nn.Module, root: nn.Module | None = None) -> None:
        self._places = _places(layers, [] if root is None else [*root.modules()])

    def run(self, version: WeightVersion, function: Callable[[], T]) -> T:
        """Runs a function with a version's aliases, if any, in place of the layers' weights."""
        aliases = version.aliases
        if not aliases:
            return function()
        places = self._places
        with replaced([(own, key, aliases[name]) for own, key, name in places if name in aliases]):
            return function()

    def backward(
        self, version: WeightVersion, roots: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Runs autograd from roots, as :meth:`run` runs a function."""
        self.run(version, lambda: torch.autograd.backward(roots, gradients))


Place = tuple[dict[str, Any], str, str]
"""A module's parameters or buffers, the name of one in that module, and its name in the stage."""


def _places(layers: nn.Module, others: Sequence[nn.Module]) -> list[Place]:
    """Returns where layers have their parameters and buffers, and other modules the parameters."""
    named = chain(layers.named_parameters(), layers.named_buffers())
    names = {id(tensor): name for name, tensor in named}
    own = [*layers.modules()]
    seen = {id(part) for part in own}
    held = [
        *(tensors for part in own for tensors in (part._parameters, part._buffers)),
        *(part._parameters for part in others if id(part) not in seen),
    ]
    return [
        (tensors, key, names[id(tensor)])
        for tensors in held
        for key, tensor in tensors.items()
        if id(tensor) in names
    ]
