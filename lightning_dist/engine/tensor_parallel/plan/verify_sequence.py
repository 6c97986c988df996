"""Verifies that a block treats each position by itself, but for layers with the whole sequence.

A copy of each kind of block is run on a whole sequence, and on each rank's shard of it. Layers that
get the whole sequence get their input of the whole run. The outputs for shards must be the shards
of the whole output. A shift, a norm over the batch, or a table of positions does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.tensor_parallel.layers.projection import input_size, is_projection
from lightning_dist.engine.tensor_parallel.layers.sequence import SEQUENCE_DIM, change_activation
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan.proof import prove_in_both_modes
from lightning_dist.engine.tensor_parallel.plan.regions import Styles, opens_early
from lightning_dist.engine.tensor_parallel.plan.trial_run import (
    Trial,
    TrialNumbers,
    differ,
    guess_trials,
    kind_of,
    shared_copy,
)

_BATCH, _LENGTH_PER_RANK = 2, 2

_Change = Callable[[Tensor], Tensor]


def check_positions(module: nn.Module, blocks: Sequence[str], styles: Styles, tp_size: int) -> None:
    """Checks that in a model's blocks only sharded layers use more than one position."""
    known: dict[Any, str | None] = {}
    for name in blocks:
        block, prefix = module.get_submodule(name), f"{name}."
        inner = {n.removeprefix(prefix): s for n, s in styles.items() if n.startswith(prefix)}
        kind = (*kind_of(block), *inner)
        if kind not in known:
            known[kind] = _find_mismatch(block, inner, tp_size)
        if known[kind] is not None:
            raise ValueError(
                f"sequence_parallel=True cuts the sequence for {name!r}, a {type(block).__name__},"
                f" which {known[kind]}, as a copy with random weights has shown. Something beside"
                " the sharded layers looks at more than one position: a norm over the batch, a"
                " shift, a mean, a table of positions. Do that outside of the blocks, or leave"
                " sequence_parallel out."
            )


def _find_mismatch(block: nn.Module, styles: Styles, tp_size: int) -> str | None:
    def trials_of(copy: nn.Module, dtype: torch.dtype) -> Iterator[Trial]:
        first = next(name for name, style in styles.items() if style is Style.COLWISE)
        width, length = input_size(copy.get_submodule(first)), _LENGTH_PER_RANK * tp_size
        x = torch.randn(_BATCH, length, width, dtype=dtype)
        return guess_trials(copy, styles, [x], length)

    return prove_in_both_modes(
        block, trials_of, partial(_PositionComparison, styles, tp_size)
    ).mismatch


class _PositionComparison:
    """The comparison of a block on a whole sequence, at once, with it on each rank's shard."""

    def __init__(self, styles: Styles, tp_size: int, copy: nn.Module, trial: Trial) -> None:
        self._styles, self._tp_size, self._copy, self._trial = styles, tp_size, copy, trial
        # The inputs of each layer that gets the whole sequence.
        self._inputs: dict[str, list[Tensor]] = {name: [] for name in _gathering(copy, styles)}
        whole = _with_changes(copy, {name: _note(given) for name, given in self._inputs.items()})
        self._returned = trial.run(whole, TrialNumbers())

    def mismatch_of_parts(self, tolerance: float) -> str | None:
        """Runs the block on each shard; see :class:`.proof.Comparison`."""
        wrong, shards = "computes something else with a part of it", self._shards(self._trial.x)
        try:
            parts = [self._run_part(rank, own, tolerance) for rank, own in enumerate(shards)]
            joined = torch.cat(parts, SEQUENCE_DIM)
        except Exception as error:
            raise ValueError(f"{wrong} ({error})") from error
        return wrong if differ(joined, self._returned, tolerance) else None

    def _run_part(self, rank: int, own: Tensor, tolerance: float) -> Tensor:
        part = _with_changes(
            self._copy,
            {name: self._give(given, rank, tolerance) for name, given in self._inputs.items()},
        )
        for name, style in self._styles.items():
            layer = part.get_submodule(name)
            if style.sums_up and is_projection(layer):  # returns a rank's shard of the sequence
                layer.register_forward_hook(lambda _, __, whole: self._shards(whole)[rank])
        return self._trial.run(part, TrialNumbers(), own)

    def _give(self, inputs: Sequence[Tensor], rank: int, tolerance: float) -> _Change:
        """Returns the function that replaces a rank's shard by the whole sequence."""
        calls = iter(inputs)

        def give(x: Tensor) -> Tensor:
            whole = next(calls)
            if differ(x, self._shards(whole)[rank], tolerance):
                raise ValueError("a sharded layer is given something else")
            return whole.clone()

        return give

    def _shards(self, whole: Tensor) -> Sequence[Tensor]:
        return whole.chunk(self._tp_size, SEQUENCE_DIM)


def _gathering(block: nn.Module, styles: Styles) -> list[str]:
    """Names the modules that are given the whole sequence, as they are when a model is sharded."""
    found = []
    for name, style in styles.items():
        if style is Style.COLWISE:
            parent = name.rpartition(".")[0]
            found.append(parent if opens_early(block, parent, [""]) else name)
    return list(dict.fromkeys(found))


def _with_changes(copy: nn.Module, changes: dict[str, _Change]) -> nn.Module:
    """Copies a copy, with the same values, and changes what some modules are given."""
    changed = shared_copy(copy)
    for name, change in changes.items():
        change_activation(changed.get_submodule(name), change)
    return changed


def _note(inputs: list[Tensor]) -> _Change:
    def note(x: Tensor) -> Tensor:
        inputs.append(x.clone())
        return x

    return note
