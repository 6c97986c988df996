"""Proves on a copy of a module that its layers can be sharded.

The copy has random weights. It is run once whole, and once for each rank with that rank's shards.
At a layer that sums up, the ranks' partial outputs must add up to the whole output, which that
layer then returns. There is no communication, and all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_dist.engine.tensor_parallel.layers.own_width import stand_in_source
from lightning_dist.engine.tensor_parallel.layers.projection import (
    cut_parts,
    input_dim,
    is_adapted,
    is_projection,
    output_dim,
    project,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.heads import check_heads, keep_own_heads
from lightning_dist.engine.tensor_parallel.plan.regions import Styles, attentions, head_widths
from lightning_dist.engine.tensor_parallel.plan.trial_run import (
    TYPES,
    Trial,
    TrialNumbers,
    differ,
    on_the_side,
    random_copy,
    shared_copy,
    tolerance_of,
)
from lightning_dist.engine.tensors.module_tree import original_class


@dataclass(frozen=True)
class Sharding:
    """How the layers inside of a module are cut.

    Attributes:
        label: The module in words.
        name: Name of the module; empty for the whole model.
        styles: Styles by the layers' names inside of the module.
        stacks: Numbers of stacked matrices by the same names.
        tp_size: Number of ranks.
        region: Full names of the layers that open its regions, or sum up.
        local: Full names of its local layers.
    """

    label: str
    name: str
    styles: Styles
    stacks: Mapping[str, int]
    tp_size: int
    region: Sequence[str]
    local: Sequence[str]


@dataclass(frozen=True)
class Finding:
    """What trials of a module have shown."""

    is_proven: bool  # the whole module could be run
    mismatch: str | None = None  # what is wrong with its parts; None if they add up


TrialsOf = Callable[[nn.Module, torch.dtype], Iterable[Trial]]
"""Lists ways to call a copy of a module, the likeliest first."""


class Comparison(Protocol):
    """A copy of a module that has been run whole, to be compared with its parts."""

    def mismatch_of_parts(self, tolerance: float) -> str | None:
        """Runs the parts; returns what is wrong with them, or None if they add up."""


Compare = Callable[[nn.Module, Trial], Comparison]
"""Runs a copy whole, in the way of a trial."""


def prove(module: nn.Module, trials_of: TrialsOf, compare: Compare, *, training: bool) -> Finding:
    """Runs a copy of a module, which may be on the meta device, whole and in parts.

    The first trial that the whole module can run counts.
    """
    for dtype in TYPES:
        try:
            copy = random_copy(module, dtype).train(training)
            trials = list(trials_of(copy, dtype))
        except Exception:  # noqa: BLE001  (the user's code, used in a way that it may not know)
            return Finding(False)
        for trial in trials:
            finding = _try(copy, trial, compare, dtype)
            if finding.is_proven:
                return finding
    return Finding(False)


def prove_in_both_modes(module: nn.Module, trials_of: TrialsOf, compare: Compare) -> Finding:
    """Runs copies in training and in evaluation mode, one of which must be able to run."""
    with on_the_side():
        found = [prove(module, trials_of, compare, training=mode) for mode in (True, False)]
    mismatches = [finding.mismatch for finding in found if finding.mismatch is not None]
    return Finding(any(finding.is_proven for finding in found), next(iter(mismatches), None))


def _try(copy: nn.Module, trial: Trial, compare: Compare, dtype: torch.dtype) -> Finding:
    try:
        tolerance = tolerance_of(lambda numbers: trial.run(shared_copy(copy), numbers), dtype)
        comparison = compare(copy, trial)
    except Exception:  # noqa: BLE001  (the user's code, used in a way that it may not know)
        return Finding(False)
    try:
        return Finding(True, comparison.mismatch_of_parts(tolerance))
    except Exception as error:  # noqa: BLE001  (as above; here it is the mismatch)
        return Finding(False) if trial.is_guess else Finding(True, str(error))


@dataclass(frozen=True)
class _Run:
    """What one call of a module has shown."""

    returned: Tensor
    sums: Mapping[str, Sequence[Tensor]]  # of each call, by layer that sums up
    input_sizes: Mapping[str, Sequence[int]]  # elements that each call is given, by local layer


class LayerComparison:
    """The comparison of a copy, run whole at once, with parts of it whose layers are cut."""

    def __init__(self, sharding: Sharding, copy: nn.Module, trial: Trial) -> None:
        self._sharding, self._copy, self._trial = sharding, copy, trial
        self._running: list[str] = []  # names of the modules whose calls have begun, not ended
        for parent in attentions(sharding.styles):
            check_heads(parent, copy.get_submodule(parent), sharding.tp_size)
        self._whole = self._run(shared_copy(copy))

    def mismatch_of_parts(self, tolerance: float) -> str | None:
        """Runs the part of each rank; see :class:`Comparison`."""
        sharding, label = self._sharding, self._sharding.label
        parts = []
        try:
            for rank in range(sharding.tp_size):
                parts.append(self._run(_part(self._copy, sharding, rank), self._whole.sums))
        except Exception as error:
            failed = self._running[-1] if self._running else ""
            kind = original_class(self._copy.get_submodule(failed)).__name__
            where = f"{failed!r}, a {kind} of {label}," if failed else f"{label}, a {kind},"
            raise ValueError(
                f"{where} cannot compute with a part of its features: {error}"
            ) from error
        return _mismatch_of(label, self._whole, parts, tolerance)

    def _run(self, module: nn.Module, sums: Mapping[str, Sequence[Tensor]] | None = None) -> _Run:
        """Runs a module, whose layers that sum up return the given sums, or their own."""
        styles = self._sharding.styles
        own: dict[str, list[Tensor]] = {n: [] for n, style in styles.items() if style.sums_up}
        for name, noted in own.items():
            _note_sums(_layer(module, name), noted, None if sums is None else sums[name])
        local = [name for name, style in styles.items() if style is Style.LOCAL]
        input_sizes: dict[str, list[int]] = {name: [] for name in local}
        # On the whole and on the parts, for torch runs other code without hooks.
        hooks = [
            module.get_submodule(name).register_forward_pre_hook(
                lambda _, given, sizes=sizes: sizes.append(given[0].numel())
            )
            for name, sizes in input_sizes.items()
        ]
        for name, part in module.named_modules():
            hooks += _note_calls(part, name, self._running) if name else ()
        try:
            returned = self._trial.run(module, TrialNumbers())
        finally:
            for hook in hooks:
                hook.remove()
            for part in module.modules():  # layers in cycles would keep their weights for long
                vars(part).pop("forward", None)
        return _Run(returned, own, input_sizes)


def _mismatch_of(label: str, whole: _Run, parts: Sequence[_Run], tolerance: float) -> str | None:
    if any(differ(part.returned, whole.returned, tolerance) for part in parts):
        return f"{label} returns something else if its layers are cut"
    for layer, sizes in whole.input_sizes.items():
        if any([len(parts) * size for size in part.input_sizes[layer]] != sizes for part in parts):
            return (
                f"{layer!r} of {label} is 'local', for what meets each rank's own features, but"
                " not all that it meets is cut; where it meets the same on all ranks, leave it out"
                " of the plan"
            )
    for layer, wanted in whole.sums.items():
        for call, sum_of_all in enumerate(wanted):
            total = torch.stack([part.sums[layer][call] for part in parts]).sum(0)
            if differ(total, sum_of_all, tolerance):
                off, reach = float((total - sum_of_all).abs().max()), float(sum_of_all.abs().max())
                return (
                    f"what the ranks of {label} give to {layer!r} does not add up to what the whole"
                    f" gives: it is off by {off:.2g}, with elements up to {reach:.2g}"
                )
    return None


def _note_sums(layer: nn.Linear, sums: list[Tensor], whole: Sequence[Tensor] | None) -> None:
    base = _layer(layer, "base_layer") if is_adapted(layer) else layer
    compute = partial(_project, base, base.weight, None)
    if base is not layer:
        base.forward = compute  # type: ignore[method-assign]
        compute = partial(type(layer).forward, layer)

    def forward(x: Tensor) -> Tensor:
        sums.append(compute(x))
        given = sums[-1] if whole is None else whole[len(sums) - 1]
        return given.clone() if layer.bias is None else given + layer.bias

    layer.forward = forward  # type: ignore[method-assign, assignment]


def _part(copy: nn.Module, sharding: Sharding, rank: int) -> nn.Module:
    """Returns one rank's part of a module, which shares the module's values."""
    part = shared_copy(copy)
    styles, tp_size = sharding.styles, sharding.tp_size
    features = head_widths(part, styles)
    for own_name, style in styles.items():
        if not style.cuts_a_matrix:
            continue
        num_stacked = sharding.stacks.get(own_name, 1)
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
            layer.forward = partial(_forward_on_source, layer)  # type: ignore[method-assign]
    for parent, width in features.items():
        keep_own_heads(part.get_submodule(parent), width, tp_size)
    return part


def _note_calls(part: nn.Module, name: str, inner: list[str]) -> list[RemovableHandle]:
    def end(*_: Any) -> None:
        inner.pop()

    begin = part.register_forward_pre_hook(lambda *_: inner.append(name))
    return [begin, part.register_forward_hook(end)]


def _forward_on_source(layer: nn.Linear, x: Tensor) -> Tensor:
    return type(layer).forward(layer, stand_in_source(x))


def _project(layer: nn.Linear, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return project(layer, stand_in_source(x), weight, bias)


def _piece(tensor: Tensor, dim: int, num_stacked: int, tp_size: int, rank: int) -> Tensor:
    matrices: Tensor = tensor.unflatten(dim, (num_stacked, -1))
    return matrices.chunk(tp_size, dim + 1)[rank].flatten(dim, dim + 1)


def _layer(module: nn.Module, name: str) -> nn.Linear:
    layer = module.get_submodule(name)
    assert is_projection(layer)
    return layer
