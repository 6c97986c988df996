"""One layer, sharded over the tensor-parallel ranks.

A weight becomes a ``DTensor``; optimizers, clipping and checkpoints need nothing else. The layer
computes with the local shard, a plain tensor, so the user's code around it sees plain tensors. The
bias of a ``rowwise`` layer, added to the sum, and that of stacked matrices stay replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_dist.engine.tensor_parallel.layers import activations
from lightning_dist.engine.tensor_parallel.layers.graph_check import ShardedActivationCheck
from lightning_dist.engine.tensor_parallel.layers.own_width import stand_in_source
from lightning_dist.engine.tensor_parallel.layers.projection import (
    cut_parts,
    input_dim,
    is_adapted,
    is_projection,
    look_up,
    output_dim,
    project,
)
from lightning_dist.engine.tensor_parallel.layers.rng import RegionRandomness
from lightning_dist.engine.tensor_parallel.layers.sharded_logits import ShardedLogits, mark
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensors.dtensor import is_dtensor, local_part, stacked
from lightning_dist.engine.tensors.module_tree import dotted
from lightning_dist.engine.tensors.observers import saves_by_hooks


@dataclass(frozen=True)
class Region:
    """A region in which each rank has other features, with its entry and exit."""

    mesh: DeviceMesh
    randomness: RegionRandomness | None  # None if it is switched further outside
    dim: int | None = None  # along which the activation outside is sharded
    crossings: ShardedActivationCheck | None = None  # None if no layer sums up

    def dim_of(self, x: Tensor) -> int | None:
        """Returns the dim along which an activation outside is sharded."""
        if self.dim is not None and x.dim() < self.dim + 2:
            raise ValueError(
                f"sequence_parallel=True wants activations of batch, sequence and features, but a"
                f" layer is given one of shape {tuple(x.shape)}. Leave sequence_parallel out."
            )
        return self.dim

    def enter(self, x: Tensor) -> Tensor:
        """Takes an activation into the region."""
        return activations.enter(x, self.mesh, self.dim_of(x))

    def begin(self, features: Tensor, layer: str, *, training: bool) -> None:
        """Begins the part in which features are sharded."""
        if self.crossings is not None:
            self.crossings.give(features, layer)
        if self.randomness is not None and training:
            self.randomness.enter()

    def end(self) -> None:
        """Ends the part in which features are sharded."""
        if self.randomness is not None:
            self.randomness.leave()

    def leave(self, own: Tensor) -> Tensor:
        """Takes an activation out of the region, summed over the ranks."""
        return activations.leave(own, self.mesh, self.dim_of(own))


@dataclass
class Entry:
    """The way into a region, for all layers that open it together.

    Query, key and value projections read one activation: it enters once, so that its gradient is
    summed over the ranks once.
    """

    region: Region
    is_open: bool = False  # a module around the layers has taken the activation in already
    _outside: Tensor | None = field(default=None, repr=False)
    _state: tuple[int, bool] = field(default=(0, False), repr=False)
    _inside: Tensor | None = field(default=None, repr=False)

    def __call__(self, x: Tensor) -> Tensor:
        """Takes an activation into the region."""
        if self.is_open:
            return x
        # After a write it is another activation, and one from a validation has no gradient.
        version = 0 if x.is_inference() else x._version
        state = version, torch.is_grad_enabled()
        if self._inside is None or self._outside is not x or self._state != state:
            self._inside = self.region.enter(x)
            self._outside, self._state = x, state
        return self._inside

    def forget(self) -> None:
        """Frees the activation."""
        self._outside = self._inside = None


@dataclass(frozen=True)
class _ShardedForward:
    """A sharded layer's forward: in a copy of the layer it would use the original's weights.

    What is around the layer may be compiled. The layer itself is not: the borders of a region would
    divide the compiled code anyway, and a compiled DTensor cannot be moved to the host after a run.
    """

    compute: Callable[[Tensor], Tensor]
    crossings: ShardedActivationCheck | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.crossings is not None and torch.compiler.is_compiling():
            self.crossings.skip()
        result: Tensor = self._run(x)
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run(self, x: Tensor) -> Tensor:
        return self.compute(x)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise ValueError(
            "A module that is sharded over tensor-parallel ranks cannot be copied. Copy it before"
            " the strategy sets it up; for an average of the weights use ShardedWeightAveraging,"
            " and for the whole model load a checkpoint with"
            " `lightning_dist.checkpoint.load_full`."
        )


def cuts_of(layer: nn.Module, style: Style, num_stacked: int) -> dict[str, Placement]:
    """Returns the placements of a layer's sharded parameters by name, before it is changed."""
    if style is Style.VOCAB:
        return {"weight": Shard(0)}
    if not is_projection(layer) or not style.cuts_a_matrix:
        return {}
    cuts: dict[str, Placement] = {}
    for path, part in cut_parts(layer, by_output=not style.sums_up).items():
        if style.sums_up:
            cuts[dotted(path, "weight")] = Shard(input_dim(part))
        elif num_stacked > 1:
            cuts[dotted(path, "weight")] = stacked(output_dim(part), num_stacked)
        else:
            cuts[dotted(path, "weight")] = Shard(output_dim(part))
            if part.bias is not None:
                cuts[dotted(path, "bias")] = Shard(0)
    return cuts


def _with_shards(
    layer: nn.Linear, bias: Callable[[nn.Linear], Tensor | None], *, by_output: bool
) -> Callable[[Tensor], Tensor]:
    """Returns a projection's forward with this rank's shards."""

    def compute(part: nn.Linear, x: Tensor) -> Tensor:
        return project(part, x, local_part(part.weight), bias(part))

    if not is_adapted(layer):
        return partial(compute, layer)
    for part in cut_parts(layer, by_output=by_output).values():
        part.forward = _ShardedForward(partial(compute, part))  # type: ignore[method-assign, assignment]
    return partial(type(layer).forward, layer)


def colwise(layer: nn.Linear, name: str, entry: Entry, num_stacked: int = 1) -> None:
    """Makes each rank compute some of a layer's output features."""
    mesh = entry.region.mesh

    def bias(part: nn.Linear) -> Tensor | None:
        if part.bias is None or is_dtensor(part.bias):
            return None if part.bias is None else local_part(part.bias)
        parts = part.bias.view(num_stacked, mesh.size(), -1)
        return parts[:, mesh.get_local_rank()].reshape(-1)

    compute = _with_shards(layer, bias, by_output=True)

    def forward(x: Tensor) -> Tensor:
        weight, x = local_part(layer.weight), stand_in_source(x)
        _check_width(name, x, weight.shape[input_dim(layer)], "takes what all ranks have")
        features = compute(entry(x))
        entry.region.begin(features, name, training=layer.training)
        return features

    layer.forward = _ShardedForward(forward, entry.region.crossings)  # type: ignore[method-assign, assignment]


def _as_shard(mesh: DeviceMesh, gradient: Tensor) -> Tensor:
    """Returns a gradient of logits as a DTensor, of which each rank has its features."""
    if is_dtensor(gradient):
        return gradient
    own = gradient.chunk(mesh.size(), -1)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(own, mesh, [Shard(gradient.dim() - 1)], run_check=False)


def colwise_gather(
    layer: nn.Linear, name: str, entry: Entry, logits: ShardedLogits | None = None
) -> None:
    """Makes each rank compute some of a layer's output features, and gathers them.

    While the mode ``logits`` is active, the layer returns sharded features instead. Not so in a
    checkpoint with the loss, say of chunks: the backward runs it again, where no mode is active.
    """
    colwise(layer, name, entry)
    compute: Callable[[Tensor], Tensor] = layer.forward
    mesh = entry.region.mesh

    def forward(x: Tensor) -> Tensor:
        features = compute(x)
        entry.region.end()
        if logits is None or not logits.is_active or saves_by_hooks():
            return activations.gather(features, mesh)
        shards = [Shard(features.dim() - 1)]
        found = DTensor.from_local(features, mesh, shards, run_check=False)
        if found.requires_grad:  # a function of the user's own may compute with whole logits
            found.register_hook(partial(_as_shard, mesh))
        return mark(found)

    layer.forward = _ShardedForward(forward, entry.region.crossings)  # type: ignore[method-assign, assignment]


def _check_width(name: str, x: Tensor, width: int, takes: str) -> None:
    if x.shape[-1] != width:
        raise ValueError(
            "Name a 'colwise' layer, which gives each rank its own features, before each 'rowwise'"
            f" one in plan=, and before nothing else: by the plan {name!r} {takes}, {width} of"
            f" them, but it is given {x.shape[-1]}."
        )


def rowwise(layer: nn.Linear, name: str, region: Region) -> None:
    """Makes each rank sum over its own input features, and all-reduces the sums."""
    compute = _with_shards(layer, lambda _: None, by_output=False)

    def forward(x: Tensor) -> Tensor:
        weight = local_part(layer.weight)
        _check_width(name, x, weight.shape[input_dim(layer)], "takes each rank's own features")
        own = compute(x)  # in the region: the dropout of an adapter meets the rank's own features
        region.end()
        summed = region.leave(own)
        return summed if layer.bias is None else summed + layer.bias

    layer.forward = _ShardedForward(forward, region.crossings)  # type: ignore[method-assign, assignment]


def vocab(layer: nn.Embedding, mesh: DeviceMesh) -> None:
    """Makes each rank look up tokens in its own rows of an embedding, and sums the results."""
    first = layer.num_embeddings // mesh.size() * mesh.get_local_rank()

    def forward(tokens: Tensor) -> Tensor:
        rows = local_part(layer.weight)
        own = tokens - first
        is_known = (tokens >= 0) & (tokens < layer.num_embeddings)  # others are an error, as usual
        is_remote = ((own < 0) | (own >= rows.shape[0])) & is_known
        found = look_up(layer, own.masked_fill(is_remote, 0), rows, first)
        return activations.leave(found.masked_fill(is_remote[..., None], 0), mesh)

    layer.forward = _ShardedForward(forward)  # type: ignore[method-assign, assignment]
