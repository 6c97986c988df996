"""Shards a model over tensor-parallel ranks, layer by layer, by a plan.

*A region* lies between the layers that compute each rank's own features and the layer that sums
over them. With sequence parallelism (:mod:`.layers.sequence`) the activations between the regions
are sharded, too. A replicated parameter that meets other features or another part of the sequence
on each rank has a partial gradient, which :meth:`TensorParallelModule.add_gradients` all-reduces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from lightning_dist.engine.tensor_parallel.layers import activations, parallel_layer
from lightning_dist.engine.tensor_parallel.layers.graph_check import (
    ReplicatedParameters,
    ShardedActivationCheck,
)
from lightning_dist.engine.tensor_parallel.layers.parallel_layer import Entry, Region
from lightning_dist.engine.tensor_parallel.layers.projection import (
    input_size,
    is_projection,
    output_size,
)
from lightning_dist.engine.tensor_parallel.layers.rng import RegionRandomness
from lightning_dist.engine.tensor_parallel.layers.sequence import (
    SEQUENCE_DIM,
    change_activation,
    check_blocks,
    cut_sequence,
    find_stacks,
)
from lightning_dist.engine.tensor_parallel.layers.sharded_logits import ShardedLogits
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.partial_gradients import (
    check_shared,
    check_tied,
    find_partial_gradients,
)
from lightning_dist.engine.tensor_parallel.plan.heads import check_heads, keep_own_heads
from lightning_dist.engine.tensor_parallel.plan.regions import (
    Partners,
    Styles,
    attentions,
    head_widths,
    opens_early,
)
from lightning_dist.engine.tensor_parallel.plan.verify_sequence import check_positions
from lightning_dist.engine.tensors.dtensor import cut, is_dtensor, local_part
from lightning_dist.engine.tensors.patch import replacement


class TensorParallelModule:
    """A module whose layers are sharded over tensor-parallel ranks.

    Args:
        module: The module, changed in place. Parameters may be on the meta device.
        styles: Styles by module name, in the order of the model.
        mesh: One-axis mesh of the tensor-parallel ranks.
        sequence_parallel: Shard the sequence between the regions.
        loss_parallel: Keep logits sharded, for a loss that takes sharded logits.
        is_kept: Returns whether this rank keeps the module of a name. Other modules are checked, so
            that all ranks find the same, but not changed.
        stage_of: Returns the pipeline stage that has the module of a name.

    Attributes:
        cuts: Placements on the tensor-parallel ranks by parameter name, of the whole model.
        logits: Context manager for steps with sharded logits; None if logits are gathered.
        crossings: The check of the regions' borders in the first step.

    Raises:
        ValueError: The ranks do not divide a size, or a style does not fit a layer.
    """

    def __init__(
        self,
        module: nn.Module,
        styles: Styles,
        mesh: DeviceMesh,
        *,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        is_kept: Callable[[str], bool] = lambda _: True,
        stage_of: Callable[[str], int | None] = lambda _: None,
    ) -> None:
        check_styles(module, styles, mesh.size(), sequence_parallel)
        self.module = module
        self.styles = styles
        kept = {name: style for name, style in styles.items() if is_kept(name)}
        self._mesh = mesh
        self.crossings = ShardedActivationCheck()
        self.logits = ShardedLogits() if loss_parallel else None
        self._randomness = RegionRandomness(mesh.get_local_rank(), torch.device(mesh.device_type))
        stacks = find_stacks(module) if sequence_parallel else []
        self._blocks = [name for stack in stacks for name in stack]
        check_blocks(module, self._blocks, styles)
        check_positions(module, self._blocks, styles, mesh.size())
        self._uses: defaultdict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                self._uses[parameter].append((part, name))
        partners = Partners(styles)
        stacks_in = {name: partners.stacked_in(module, name) for name in styles}
        self.cuts = {
            f"{name}.{attribute}": placement
            for name, style in styles.items()
            for attribute, placement in parallel_layer.cuts_of(
                module.get_submodule(name), style, stacks_in[name]
            ).items()
        }
        would_be_partial = find_partial_gradients(module, styles, self._is_in_block)
        check_shared(module, would_be_partial, self.cuts)
        check_tied(module, styles, self.cuts)
        self._would_be_partial = frozenset(would_be_partial)
        partial = [name for name in would_be_partial if is_kept(name)]
        self._entries: dict[str, Entry] = {}
        for name, style in kept.items():
            self._shard(name, style, stacks_in[name])
        for parent, features in head_widths(module, kept).items():
            keep_own_heads(module.get_submodule(parent), features, mesh.size())
        for stack in stacks:
            # What crosses from stage to stage is whole.
            for _, of_stage in groupby(filter(is_kept, stack), key=stage_of):
                blocks = [module.get_submodule(name) for name in of_stage]
                cut_sequence(blocks[0], blocks[-1], mesh, self._randomness, self.crossings)
        for part in module.modules():
            if isinstance(part, nn.TransformerEncoder):
                part.use_nested_tensor = False  # in evaluation, with padding; none can be sharded
        parameters = dict(module.named_parameters(remove_duplicate=False))
        self._partial = [name for name in partial if not is_dtensor(parameters[name])]
        self._summed: set[nn.Parameter] = set()

    @torch.no_grad()
    def begin_backward(self) -> None:
        """Lets gradients that an earlier update has left count once in the next sums.

        Call it before new gradients are added to those of the parameters, but behind ``zero_grad``.
        """
        # As a rule they are None. If users keep them, each rank has the sum: it stays on one rank,
        # and becomes zero on the others. While a parameter is frozen, nothing sums it again.
        again = [parameter for parameter in self._summed if parameter.requires_grad]
        self._summed.difference_update(again)
        for parameter in again:
            if parameter.grad is not None and self._mesh.get_local_rank() > 0:
                local_part(parameter.grad).zero_()

    @torch.no_grad()
    def add_gradients(self) -> None:
        """All-reduces the partial gradients. Collective: every rank must call it, once per update.

        A rank without a gradient, whose tokens went to other experts, gets the other ranks' sum.
        """
        parameters = dict(self.module.named_parameters())
        partial = [parameters[name] for name in self._partial if name in parameters]
        trained = [p for p in partial if p.requires_grad]
        activations.all_reduce_gradients(trained, self._mesh)
        self._summed.update(trained)

    def check_graph(self, outputs: Iterable[Tensor]) -> None:
        """Checks a step's autograd graph, until :meth:`ShardedActivationCheck.end` is called.

        Raises:
            ValueError: The graph does not follow the plan.
        """
        if self.crossings.is_noting:
            self.crossings.check(outputs, self._replicated_parameters())

    def _replicated_parameters(self) -> ReplicatedParameters:
        replicated = ReplicatedParameters({}, {}, {})
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if is_dtensor(parameter):
                continue
            if name not in self._would_be_partial:
                replicated.others[id(parameter)] = name
            elif self._is_in_block(name):
                replicated.in_blocks[id(parameter)] = name
            else:
                replicated.inside[id(parameter)] = name
        return replicated

    def forget_step(self) -> None:
        """Leaves the region in which a step has failed, and frees its activations."""
        self._randomness.leave()
        self.crossings.begin()
        for entry in self._entries.values():
            entry.forget()

    def _shard(self, name: str, style: Style, num_stacked: int) -> None:
        layer = self.module.get_submodule(name)
        region = Region(self._mesh, self._randomness, crossings=self.crossings)
        if self._is_in_block(name):
            region = replace(region, randomness=None, dim=SEQUENCE_DIM)
        for attribute, placement in parallel_layer.cuts_of(layer, style, num_stacked).items():
            self._place(layer, attribute, placement)
        if style is Style.VOCAB:
            assert isinstance(layer, nn.Embedding)
            parallel_layer.vocab(layer, self._mesh)
        if not is_projection(layer):
            return
        if style.sums_up:
            parallel_layer.rowwise(layer, name, region)
        elif style is Style.COLWISE:
            parallel_layer.colwise(layer, name, self._entry(name, region), num_stacked)
        elif style is Style.COLWISE_GATHER:
            entry = Entry(replace(region, crossings=None))
            parallel_layer.colwise_gather(layer, name, entry, self.logits)

    def _entry(self, name: str, region: Region) -> Entry:
        """Returns the entry that a layer shares with the layers beside it."""
        parent_name = name.rpartition(".")[0]
        if parent_name not in self._entries:
            self._entries[parent_name] = entry = Entry(region)
            parent = self.module.get_submodule(parent_name)
            parent.register_forward_hook(lambda *_: entry.forget())
            if region.dim is not None and opens_early(self.module, parent_name, self._blocks):
                # It may look at the length of what it is given, which is that of its layers' then.
                entry.is_open = True
                outer = Entry(region)
                change_activation(parent, outer)
                parent.register_forward_hook(lambda *_: outer.forget())
        return self._entries[parent_name]

    def _is_in_block(self, name: str) -> bool:
        return any(name == block or name.startswith(f"{block}.") for block in self._blocks)

    def _place(self, layer: nn.Module, name: str, placement: Placement) -> None:
        whole: Any = layer.get_parameter(name)
        if is_dtensor(whole):  # tied to one that came before
            if whole.placements != (placement,):
                raise ValueError(
                    "Use 'vocab' for an embedding and 'colwise_gather' for a head that share a"
                    " weight: two layers share a parameter, but the plan shards them in different"
                    " ways."
                )
            return
        part = replacement(whole, cut(whole, self._mesh, [placement]))
        for holder, attribute in self._uses[whole]:
            setattr(holder, attribute, part)


def check_not_sharded(module: nn.Module) -> None:
    """Checks that no parameter of a module is a DTensor already."""
    name = next((name for name, p in module.named_parameters() if is_dtensor(p)), None)
    if name is not None:
        raise ValueError(
            f"{name!r} is sharded over ranks already, as part of another LightningModule. Go on"
            " with that one, or build the model anew and load a checkpoint."
        )


def check_styles(module: nn.Module, styles: Styles, tp_size: int, sequence_parallel: bool) -> None:
    """Checks that the ranks divide all sizes."""
    partners = Partners(styles)
    for name in attentions(styles):
        check_heads(name, module.get_submodule(name), tp_size)
    for name, style in styles.items():
        if style.needs_sequence_parallel and not sequence_parallel:
            raise ValueError(
                "Pass sequence_parallel=True, or use another style in plan=: the style"
                f" {style.value!r} of {name!r} needs sequence_parallel=True."
            )
        layer = module.get_submodule(name)
        if style is Style.VOCAB:
            assert isinstance(layer, nn.Embedding)
            _check_size(name, "rows", layer.num_embeddings, tp_size)
        elif style.sums_up:
            _check_size(name, "input features", input_size(layer), tp_size)
        elif style.takes_whole_input:
            features = output_size(layer) // partners.stacked_in(module, name)
            _check_size(name, "output features", features, tp_size)


def _check_size(name: str, what: str, size: int, tp_size: int) -> None:
    if size % tp_size:
        raise ValueError(
            f"Leave {name!r} out of plan=, or use another tp_size: the {size} {what} of {name!r}"
            f" cannot be shared out over tp_size={tp_size} ranks; or pad them to"
            f" {-(-size // tp_size) * tp_size}."
        )
