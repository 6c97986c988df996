"""Verifies that shards add up to the whole, before a layer is sharded.

Whether layers can be sharded depends on the code between them, which may lay out its heads in
another way, or use all features at once. So a copy of the module around the layers is run with
random weights: once whole, and once for each rank with that rank's shards. At a layer that sums up,
the ranks' partial outputs must add up to the whole output, which that layer then returns. There is
no communication, and all ranks find the same. A module whose arguments cannot be guessed
(:mod:`.plan.trial_run`), or a large whole model, is not verified. If it has an attention that
computes with the width of all heads, that is a flaw, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.tensor_parallel.layers.own_width import behind
from lightning_dist.engine.tensor_parallel.layers.projection import (
    cut_parts,
    has_own_forward,
    input_dim,
    input_size,
    is_adapted,
    is_projection,
    output_dim,
    project,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.attention import is_attention_projection
from lightning_dist.engine.tensor_parallel.plan.heads import (
    check_heads,
    explain_shapes,
    keep_own_heads,
    needs_proof,
)
from lightning_dist.engine.tensor_parallel.plan.regions import (
    Partners,
    Styles,
    attentions,
    head_widths,
    holders,
    paths,
)
from lightning_dist.engine.tensor_parallel.plan.trial_run import (
    TrialCall,
    differ,
    kind_of,
    on_the_side,
    random_copy,
    shared_copy,
    train_if_possible,
    trial_calls,
)
from lightning_dist.engine.tensors.module_tree import original_class

_BATCH, _LENGTH = 2, 4
_LARGEST_MODEL = 2**25  # parameters of a whole model to copy; parts of a model are always copied


def find_mismatches(module: nn.Module, styles: Styles, tp_size: int) -> dict[str, str]:
    """Returns the flaws of modules that compute another result if sharded, by module name."""
    known: dict[Any, str | None] = {}
    found: dict[str, str] = {}
    all_holders, partners = holders(module, styles), Partners(styles)
    met = {layer for layers in all_holders.values() for layer in layers}
    alone = {n: style for n, style in styles.items() if style.sums_up and n not in met}
    local = local_in(styles, all_holders)
    for name, layers in all_holders.items():
        stacks = {_inside(name, n): partners.stacked_in(module, n) for n in layers}
        inner = {_inside(name, n): styles[n] for n in layers}
        inner |= {_inside(name, n): Style.LOCAL for n in local.get(name, ())}
        inner |= {_inside(name, n): style for n, style in alone.items() if _is_in(n, name)}
        holder = module.get_submodule(name)
        kind = (*kind_of(holder), *inner)
        if not name and sum(p.numel() for p in holder.parameters()) > _LARGEST_MODEL:
            known[kind] = _unproven(name, holder, inner, tp_size)
        elif kind not in known:
            with on_the_side():
                known[kind] = _find_flaw(name, holder, inner, stacks, tp_size)
        flaw = known.get(kind)
        if flaw is not None:
            found[name] = flaw
    return found


def check_parts(module: nn.Module, styles: Styles, tp_size: int) -> None:
    """Checks that sharded layers compute the whole result, as far as a copy can be run."""
    _check_ends(styles)
    _check_local(module, styles)
    all_holders = holders(module, styles)
    for name, flaw in find_mismatches(module, styles, tp_size).items():
        layers = all_holders[name]
        named = shorten([repr(layer) for layer in layers], 4)
        each = "hidden feature is computed by itself"
        if any(map(is_attention_projection, (layer.rpartition(".")[2] for layer in layers))):
            each = (
                "head is computed by itself (of a fused layer: all queries, then all keys, then all"
                " values)"
            )
        raise ValueError(
            f"Leave {named} out of plan=, or write {_label_of(name, module)} so that each {each}:"
            f" {flaw}. (A copy of it with random weights was run whole and as tp_size={tp_size}"
            " parts.)"
        )


def local_in(styles: Styles, all_holders: Collection[str]) -> dict[str, list[str]]:
    """Returns the local layers by their smallest holder."""
    found: dict[str, list[str]] = {}
    for name, style in styles.items():
        around = (path for path in paths(name) if path != name and path in all_holders)
        holder = next(around, None) if style is Style.LOCAL else None
        if holder is not None:
            found.setdefault(holder, []).append(name)
    return found


def _is_in(name: str, holder: str) -> bool:
    return name.startswith(f"{holder}." if holder else "")


def _check_ends(styles: Styles) -> None:
    """Checks that regions begin and end."""
    begins = [name for name, style in styles.items() if style is Style.COLWISE]
    ends = [name for name, style in styles.items() if style.sums_up]
    if begins and not ends:
        raise ValueError(
            "Name the layer that takes what it gives 'rowwise' in plan=, or use 'colwise_gather':"
            f" the plan gives each rank its own features in {begins[0]!r} ('colwise'), and no layer"
            " sums up over them."
        )
    partners = Partners(styles)
    met = {partners.of(name) for name in begins}
    parents = {name.rpartition(".")[0] for name in begins}
    for name in ends:
        if name not in met and name.rpartition(".")[0] not in parents:
            raise ValueError(
                f"Name the layer that gives {name!r} its features 'colwise' in plan=, or leave it"
                f" out: the plan sums up over the ranks' own features in {name!r}, as a"
                f" {styles[name].value!r} layer does, and no layer beside it gives them any."
            )


def _check_local(module: nn.Module, styles: Styles) -> None:
    inside = {n for names in local_in(styles, holders(module, styles)).values() for n in names}
    for name, style in styles.items():
        if style is Style.LOCAL and name not in inside:
            raise ValueError(
                f"Leave {name!r} out of plan=: it says that {name!r} meets each rank's own features"
                " ('local'), but nothing is cut in the module that has it: no 'colwise' and"
                " 'rowwise' layers are beside it. It meets the same on all ranks."
            )


def _label_of(name: str, holder: nn.Module) -> str:
    """Names a module, or the whole model by its class."""
    return repr(name or original_class(holder).__name__)


def _find_flaw(
    name: str, holder: nn.Module, styles: Styles, stacks: Mapping[str, int], tp_size: int
) -> str | None:
    label = _label_of(name, holder)
    for layer in styles:
        if has_own_forward(holder.get_submodule(layer)):
            return f"{layer!r} of {label} has a forward of its own, which would be lost"
    try:
        for parent in attentions(styles):
            check_heads(parent, holder.get_submodule(parent), tp_size)
        copy = random_copy(holder)
        activations = _activations(copy, styles)
        calls = list(trial_calls(copy, styles, _LENGTH))
    except Exception:  # noqa: BLE001  (the user's code, used in a way that it may not know)
        return _unproven(name, holder, styles, tp_size)
    for x, call in product(activations, calls):
        inner: list[str] = []
        run = partial(_Run, styles=styles, call=call, x=x, inner=inner)
        try:
            train_if_possible(copy, partial(call.run, copy, x))
            whole = run(shared_copy(copy))
        except Exception:  # noqa: BLE001  (as above)
            continue
        try:
            parts = [
                run(_part(name, copy, styles, stacks, tp_size, rank), whole=whole.sums)
                for rank in range(tp_size)
            ]
        except Exception as error:  # noqa: BLE001  (as above; here it is the flaw)
            if call.is_guess:
                continue
            failed = inner[-1] if inner else ""
            kind = original_class(holder.get_submodule(failed)).__name__
            where = f"{failed!r}, a {kind} of {label}," if failed else f"{label}, a {kind},"
            return f"{where} cannot compute with a part of its features: {error}"
        return _flaw_of(name, holder, whole, parts)
    return _unproven(name, holder, styles, tp_size)


def _unproven(name: str, holder: nn.Module, styles: Styles, tp_size: int) -> str | None:
    """Returns the flaw of a module that could not be run; None if there is none."""
    for parent, width in head_widths(holder, styles).items():
        attention = holder.get_submodule(parent)
        if needs_proof(attention, width):
            path = ".".join(filter(None, (name, parent)))
            try:
                check_heads(path, attention, tp_size)
            except ValueError as error:
                return str(error)
            return (
                f"{path!r} computes with the width of all heads, and could not be run on its own to"
                " see what it does with that of some"
            )
    return None


def _flaw_of(name: str, holder: nn.Module, whole: _Run, parts: Sequence[_Run]) -> str | None:
    label = _label_of(name, holder)
    if any(differ(part.returned, whole.returned) for part in parts):
        return f"{label} returns something else if its layers are cut"
    for layer, met in whole.met.items():
        if any([len(parts) * size for size in part.met[layer]] != met for part in parts):
            return (
                f"{layer!r} of {label} is 'local', for what meets each rank's own features, but"
                " not all that it meets is cut; where it meets the same on all ranks, leave it out"
                " of the plan"
            )
    for layer, wanted in whole.sums.items():
        for call, sum_of_all in enumerate(wanted):
            total = torch.stack([part.sums[layer][call] for part in parts]).sum(0)
            if differ(total, sum_of_all):
                off, reach = float((total - sum_of_all).abs().max()), float(sum_of_all.abs().max())
                return (
                    f"what the ranks of {label} give to {layer!r} does not add up to what the whole"
                    f" gives: it is off by {off:.2g}, with elements up to {reach:.2g}"
                )
    return None


class _Run:
    """One call of a module."""

    def __init__(
        self,
        module: nn.Module,
        styles: Styles,
        call: TrialCall,
        x: Tensor,
        inner: list[str],
        whole: Mapping[str, Sequence[Tensor]] | None = None,
    ) -> None:
        names = [name for name, style in styles.items() if style.sums_up]
        self.sums: dict[str, list[Tensor]] = {name: [] for name in names}
        for name in names:
            given = None if whole is None else whole[name]
            _note_sums(_layer(module, name), self.sums[name], given)
        local = [name for name, style in styles.items() if style is Style.LOCAL]
        self.met: dict[str, list[int]] = {name: [] for name in local}
        # On the whole and on the parts, for torch runs other code without hooks.
        hooks = [
            module.get_submodule(name).register_forward_pre_hook(
                lambda _, given, sizes=sizes: sizes.append(given[0].numel())
            )
            for name, sizes in self.met.items()
        ]
        for name, part in module.named_modules():
            hooks += _note_calls(part, name, inner) if name else ()
        self.returned = call.run(module, x)
        for hook in hooks:
            hook.remove()


def _note_sums(layer: nn.Linear, sums: list[Tensor], whole: Sequence[Tensor] | None) -> None:
    base = _layer(layer, "base_layer") if is_adapted(layer) else layer
    compute = partial(_without_bias, base)
    if base is not layer:
        base.forward = compute  # type: ignore[method-assign]
        compute = partial(type(layer).forward, layer)

    def forward(x: Tensor) -> Tensor:
        sums.append(compute(x))
        given = sums[-1] if whole is None else whole[len(sums) - 1]
        return given.clone() if layer.bias is None else given + layer.bias

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _part(
    name: str,
    copy: nn.Module,
    styles: Styles,
    stacks: Mapping[str, int],
    tp_size: int,
    rank: int,
) -> nn.Module:
    """Returns one rank's part of a module, which shares the module's values."""
    part = shared_copy(copy)
    features = head_widths(part, styles)
    for own_name, style in styles.items():
        if not style.cuts_a_matrix:
            continue
        num_stacked = stacks.get(own_name, 1)
        layer = _layer(part, own_name)
        for cut in cut_parts(layer, by_output=not style.sums_up).values():
            dim = input_dim(cut) if style.sums_up else output_dim(cut)
            weight = _piece(cut.weight, dim, num_stacked, tp_size, rank)
            if style.sums_up:
                cut.weight = nn.Parameter(weight, requires_grad=False)
                continue
            bias = None if cut.bias is None else _piece(cut.bias, 0, num_stacked, tp_size, rank)
            cut.forward = partial(_project, cut, weight, bias)  # type: ignore[method-assign]
        if is_adapted(layer) and not style.sums_up:
            whole = partial(type(layer).forward, layer)
            layer.forward = _behind(whole)  # type: ignore[method-assign, assignment]
    for parent, width in features.items():
        keep_own_heads(part.get_submodule(parent), width, tp_size)
        path = f"{name}.{parent}" if parent else name
        explain_shapes(path, part.get_submodule(parent), tp_size)
    return part


def _note_calls(part: nn.Module, name: str, inner: list[str]) -> list[RemovableHandle]:
    def end(*_: Any) -> None:
        inner.pop()

    begin = part.register_forward_pre_hook(lambda *_: inner.append(name))
    return [begin, part.register_forward_hook(end)]


def _behind(compute: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: compute(behind(x))


def _without_bias(layer: nn.Linear, x: Tensor) -> Tensor:
    return project(layer, x, layer.weight, None)


def _project(layer: nn.Linear, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return project(layer, behind(x), weight, bias)


def _piece(tensor: Tensor, dim: int, num_stacked: int, tp_size: int, rank: int) -> Tensor:
    matrices: Tensor = tensor.unflatten(dim, (num_stacked, -1))
    return matrices.chunk(tp_size, dim + 1)[rank].flatten(dim, dim + 1)


def _activations(module: nn.Module, styles: Styles) -> list[Tensor]:
    """Creates sequences and batches of vectors, the likeliest first; each as wide as some layer."""
    first = next(name for name, style in styles.items() if style.takes_whole_input)
    layers = [_layer(module, first), *filter(is_projection, module.modules())]
    widths = dict.fromkeys(map(input_size, layers))
    sequences = [torch.randn(_BATCH, _LENGTH, width) for width in widths]
    vectors = [x.flatten(0, 1) for x in sequences]
    normalises = any(isinstance(part, nn.BatchNorm1d) for part in module.modules())
    return [*vectors, *sequences] if normalises else [*sequences, *vectors]


def _layer(module: nn.Module, name: str) -> nn.Linear:
    layer = module.get_submodule(name)
    assert is_projection(layer)
    return layer


def _inside(holder: str, name: str) -> str:
    return name.removeprefix(f"{holder}.") if holder else name
