"""What each rank holds of a model that is spread over tensor-parallel ranks, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_dist.engine.common.name_pattern import with_stars
from lightning_dist.engine.common.table import draw_table
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensor_parallel.plan_summary import PlanSummary
from lightning_dist.engine.tensors.local_part import local_part
from lightning_dist.engine.tensors.placements import stacked_dim


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Parameters that are alike but for the number of their layer.

    Attributes:
        pattern: Of their names.
        count: How many.
        style: Of the layer, or empty.
        shape: Of each, whole.
        held: What this rank holds of each.
        placement: How it lies on the tensor-parallel ranks.
        num_bytes: That this rank holds of all of them.
    """

    pattern: str
    count: int
    style: str
    shape: tuple[int, ...]
    held: tuple[int, ...]
    placement: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """All parameters; as text, a table.

    Attributes:
        rows: In the order of the model.
        plan: That was found; None where the user has given one.
    """

    rows: tuple[TensorRow, ...]
    plan: PlanSummary | None = None

    @property
    def num_bytes(self) -> int:
        """What this rank holds."""
        return sum(row.num_bytes for row in self.rows)

    def __str__(self) -> str:
        """Draws the table."""
        lines: list[tuple[str, ...]] = [
            ("parameters", "", "style", "whole", "on each rank", "", "bytes")
        ]
        lines += [_line(row) for row in self.rows]
        lines.append(("all", "", "", "", "", "", f"{self.num_bytes:,}"))
        table = draw_table(lines, right=(1, 6))
        return table if self.plan is None else f"{self.plan}\n{table}"


def summarise(
    module: nn.Module, styles: Mapping[str, Style], plan: PlanSummary | None = None
) -> TensorSummary:
    """Describes a module that has been spread.

    Args:
        module: The model.
        styles: By module name, as it was spread.
        plan: That was found; None where the user has given one.
    """
    rows: dict[TensorRow, int] = {}
    for name, parameter in module.named_parameters():
        style, own = styles.get(name.rpartition(".")[0]), local_part(parameter)
        row = TensorRow(
            with_stars(name),
            1,
            "" if style is None else style.value,
            tuple(parameter.shape),
            tuple(own.shape),
            _placement(parameter),
            own.numel() * own.element_size(),
        )
        rows[row] = rows.get(row, 0) + 1
    return TensorSummary(
        tuple(
            replace(row, count=count, num_bytes=count * row.num_bytes)
            for row, count in rows.items()
        ),
        plan,
    )


def _placement(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "the whole"
    axes = parameter.device_mesh.mesh_dim_names
    if axes is not None and "tp" not in axes:  # sharded over data ranks only
        return "the whole"
    dim = stacked_dim(parameter)
    if dim is not None:
        return f"several pieces along dim {dim}"
    placement = parameter.placements[-1]
    return f"a piece along dim {placement.dim}" if isinstance(placement, Shard) else "the whole"


def _line(row: TensorRow) -> tuple[str, ...]:
    count = "" if row.count == 1 else f"x{row.count}"
    whole, held = (" x ".join(map(str, shape)) for shape in (row.shape, row.held))
    return (row.pattern, count, row.style, whole, held, row.placement, f"{row.num_bytes:,}")
