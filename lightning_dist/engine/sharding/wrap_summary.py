"""The summary of a choice of units: each unit's parameters, and the peak of whole parameters.

With resharding after the forward a unit is whole only while it runs, and FSDP2 gathers the next
unit meanwhile. So the peak is the root's own parameters (the root runs all the time), and two
neighbouring units with the units around them. Units that are not resharded add up until their
backward. So do the shards of units that are resharded to fewer ranks. This holds for modules that
run in the order of the module tree. A unit of which no input needs a gradient stays whole to the
end of the backward. Shards, gradients, optimizer state and the buffers of collectives do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lightning_dist.engine.common.table import draw_table, format_bytes, format_count
from lightning_dist.engine.sharding.wrap import Unit
from lightning_dist.engine.tensors.module_tree import bottom_up, original_class, parameter_uses

ROOT = Unit("")


@dataclass(frozen=True, slots=True)
class WrapRow:
    """One unit.

    Attributes:
        unit: The unit; the root's name is empty.
        class_name: The module's class.
        num_parameters: Elements of the unit's own parameters, without those of units inside.
        num_bytes: Bytes of these parameters while they are whole.
    """

    unit: Unit
    class_name: str
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WrapSummary:
    """A model's units; ``str`` draws a table in which equal units are one line.

    Attributes:
        rows: The root first, then the units in the order of ``named_modules``.
        peak_whole_bytes: The most bytes of parameters that are whole at the same time, as assumed
            at the top of this module.
    """

    rows: tuple[WrapRow, ...]
    peak_whole_bytes: int

    @property
    def num_bytes(self) -> int:
        """The bytes of all parameters when they are whole."""
        return sum(row.num_bytes for row in self.rows)

    def __str__(self) -> str:
        """Draws the table."""
        lines = [("unit", "class", "parameters", "whole", "")]
        lines += [_line(rows) for rows in _equal_rows(self.rows)]
        count = format_count(sum(row.num_parameters for row in self.rows))
        peak = f"{format_bytes(self.peak_whole_bytes)} at a time"
        lines.append(("all", "", count, format_bytes(self.num_bytes), peak))
        return draw_table(lines, right=(2, 3))


def describe(
    module: nn.Module,
    units: Sequence[Unit],
    *,
    bytes_per_element: int | None = None,
    reshard_after_forward: bool | int = True,
) -> WrapSummary:
    """Returns the summary of a model's units, before or after the model is sharded.

    A parameter belongs to the innermost unit around it, a shared one to the innermost unit around
    all its uses, and counts once.

    Args:
        module: The model; parameters may be on the meta device, or DTensors, which count globally.
        units: The units that a policy has selected.
        bytes_per_element: Bytes per element of whole parameters, such as 2 under bf16 mixed
            precision, but for units with ``keep_fp32``. None for each parameter's own.
        reshard_after_forward: Default for units that leave it open, as for ``fully_shard``.
    """
    by_name = {unit.name: unit for unit in (ROOT, *units)}
    counts, sizes = dict.fromkeys(by_name, 0), dict.fromkeys(by_name, 0)
    for use in parameter_uses(module, [unit.name for unit in units]):
        own = bytes_per_element is None or by_name[use.home].keep_fp32
        element = use.parameter.element_size() if own else bytes_per_element
        assert element is not None
        counts[use.home] += use.parameter.numel()
        sizes[use.home] += use.parameter.numel() * element
    top_down = [name for name, _ in module.named_modules() if name in by_name]
    assert len(top_down) == len(by_name), "a unit has its module's first name"
    rows = tuple(
        WrapRow(
            unit=by_name[name],
            class_name=original_class(module.get_submodule(name)).__name__,
            num_parameters=counts[name],
            num_bytes=sizes[name],
        )
        for name in top_down
    )
    upwards = [name for name, _ in bottom_up(module) if name in by_name]
    return WrapSummary(rows, _peak(rows, top_down, upwards, reshard_after_forward))


def _peak(
    rows: Sequence[WrapRow], top_down: list[str], upwards: list[str], default: bool | int
) -> int:
    sizes = {row.unit.name: row.num_bytes for row in rows}
    kept = {row.unit.name: _kept(row, default) for row in rows}

    def added(one: str, other: str) -> int:
        whole = {name for name in sizes if _is_around(name, one) or _is_around(name, other)}
        return sum(sizes[name] - kept[name] for name in whole)

    # Forwards begin in the order of `top_down` and end in `upwards`, which backward reverses.
    pairs = {("", ""), *pairwise(top_down), *pairwise(upwards)}
    return sum(kept.values()) + max(added(one, other) for one, other in pairs)


def _kept(row: WrapRow, default: bool | int) -> int:
    """Returns the bytes that stay on each rank from a unit's forward to its backward."""
    chosen = row.unit.reshard_after_forward
    reshard = default if chosen is None else chosen
    if reshard is False:
        return row.num_bytes
    return 0 if reshard is True else -(-row.num_bytes // reshard)


def _is_around(outer: str, inner: str) -> bool:
    return outer in ("", inner) or inner.startswith(outer + ".")


def _equal_rows(rows: Sequence[WrapRow]) -> list[list[WrapRow]]:
    groups: dict[object, list[WrapRow]] = {}
    for row in rows:
        place = tuple("" if part.isdigit() else part for part in row.unit.name.split("."))
        key = (place, row.class_name, row.num_parameters, row.num_bytes, *_options(row.unit))
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _line(rows: list[WrapRow]) -> tuple[str, str, str, str, str]:
    first, last = rows[0], rows[-1]
    options = ", ".join(_options(first.unit))
    sizes = (format_count(first.num_parameters), format_bytes(first.num_bytes))
    if len(rows) == 1:
        return (first.unit.name or "(root)", first.class_name, *sizes, options)
    name = f"{first.unit.name} ... {last.unit.name}"
    return (
        name,
        f"{first.class_name} x{len(rows)}",
        *sizes,
        f"each, {options}" if options else "each",
    )


def _options(unit: Unit) -> list[str]:
    reshard = unit.reshard_after_forward
    said = [] if reshard is None else [f"reshard_after_forward={reshard}"]
    return [*said, "keep_fp32"] if unit.keep_fp32 else said
