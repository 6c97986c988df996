"""Summaries of a tensor-parallel model: a table of each rank's tensors, and the plan in words.

The plan's lines name the sharded layers, and the reasons why the others are replicated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_dist.engine.common.names import shorten, with_stars
from lightning_dist.engine.common.table import draw_table
from lightning_dist.engine.tensor_parallel.layers.projection import (
    is_adapted,
    is_projection,
    projection_name,
)
from lightning_dist.engine.tensor_parallel.layers.styles import Style
from lightning_dist.engine.tensors.dtensor import local_part, stacked_dim
from lightning_dist.engine.tensors.module_tree import original_class

_KINDS = {Style.VOCAB: "embedding", Style.COLWISE_GATHER: "head", Style.REPLICATE: "replicated"}
_SMALL = 0.01  # least share of the parameters for which a reason is listed
_WORTH_A_LINE = 0.05  # least share of replicated parameters that a run mentions at its start
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan in a few lines.

    Attributes:
        sharded: For each kind of sharded layer, the layers and their styles.
        replicated: For each reason why parts are replicated, the parts and their size.
        largest: The largest replicated parts in one line; empty if they are small.
    """

    sharded: tuple[str, ...]
    replicated: tuple[str, ...]
    largest: str

    def __str__(self) -> str:
        """Joins the lines."""
        return "\n".join([*self.sharded, *self.replicated])


def describe_plan(
    module: nn.Module, styles: Mapping[str, Style], reasons: Mapping[str, str]
) -> PlanSummary:
    """Returns the summary of a plan; layers that differ only in their number are one entry."""
    entries: dict[str, list[str]] = {}
    for name, style in styles.items():
        is_attention = "att" in name.lower()
        kind = _KINDS.get(style, "attention" if is_attention else "mlp")
        entries.setdefault(kind, []).append(f"{with_stars(name)} ({style.value})")
    parts = find_replicated(module, styles, reasons)
    lines = [
        f"replicated: {_list(part.patterns)}{_format_reason(part)}"
        for part in parts
        if part.share >= _SMALL
    ]
    small = [pattern for part in parts if part.share < _SMALL for pattern in part.patterns]
    if small:
        lines.append(f"replicated, less than {_SMALL:.0%} for each reason: {_list(small)}")
    sharded = [f"{kind}: {_list(names)}" for kind, names in entries.items()]
    return PlanSummary(tuple(sharded), tuple(lines), _describe_largest(parts))


@dataclass(frozen=True)
class ReplicatedPart:
    """Modules that are replicated for one reason, by patterns of their names."""

    patterns: tuple[str, ...]
    share: float  # of all parameters of the model
    reason: str


def find_replicated(
    module: nn.Module, styles: Mapping[str, Style], reasons: Mapping[str, str]
) -> list[ReplicatedPart]:
    """Lists the parts that a plan replicates, in the order of the model."""
    named = map(module.get_submodule, styles)
    counted = {p for part in named for p in part.parameters(recurse=is_adapted(part))}
    sizes: dict[tuple[str, str], int] = {}  # by pattern and reason
    for name, part in module.named_modules():
        own = set(part.parameters(recurse=False)) - counted
        if name in styles or not own:
            continue
        key = with_stars(name) or "itself", reasons.get(name) or _reason(module, name)
        sizes[key] = sizes.get(key, 0) + sum(parameter.numel() for parameter in own)
        counted |= own
    total = sum(parameter.numel() for parameter in module.parameters())
    found: dict[str, list[str]] = {}
    for pattern, reason in sizes:
        found.setdefault(reason, []).append(pattern)
    return [
        ReplicatedPart(tuple(patterns), sum(sizes[p, reason] for p in patterns) / total, reason)
        for reason, patterns in found.items()
    ]


def _reason(module: nn.Module, name: str) -> str:
    """Returns the reason that follows from the kind of a module."""
    part = module.get_submodule(name)
    kind = original_class(part).__name__
    around = module.get_submodule(name.rpartition(".")[0])
    if isinstance(part, nn.MultiheadAttention) or isinstance(around, nn.MultiheadAttention):
        return (
            "nn.MultiheadAttention uses its weights itself; write nn.Linear projections around"
            " F.scaled_dot_product_attention"
        )
    if isinstance(part, nn.RNNBase | nn.RNNCellBase):
        return f"an {kind} needs all features of its state at each step"
    if isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "convolutions are not sharded"
    if isinstance(part, nn.Embedding):
        return "only the embedding of a vocabulary is sharded"
    if is_projection(part):
        return (
            "no other layer by whose name and size it belongs to an attention, an MLP or a"
            " vocabulary; name it and its partner in plan={...}"
        )
    if any(parameter.dim() > 1 for parameter in part.parameters(recurse=False)):
        return f"a {kind} is not sharded"
    return f"a {kind} works on what all ranks have"


def _describe_largest(parts: Sequence[ReplicatedPart]) -> str:
    total = sum(part.share for part in parts)
    if total < _WORTH_A_LINE:
        return ""
    largest = max(parts, key=lambda part: part.share)
    rest = total - largest.share
    more = f"; {rest:.0%} more: trainer.strategy.describe()" if rest >= _SMALL else ""
    return f"replicated: {shorten(largest.patterns, _MOST_NAMES)}{_format_reason(largest)}{more}"


def _format_reason(part: ReplicatedPart) -> str:
    return f" ({part.share:.0%} of the parameters): {part.reason}"


def _list(names: Sequence[str]) -> str:
    return shorten(list(dict.fromkeys(names)))


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Parameters that are alike but for the number of their layer.

    Attributes:
        pattern: Pattern of the parameters' names.
        count: Number of the parameters.
        style: Style of the layer; empty without one.
        shape: Shape of each whole parameter.
        held: Shape of this rank's shard of each parameter.
        placement: Placement on the tensor-parallel ranks, in words.
        num_bytes: Bytes of all these parameters on this rank.
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
    """All parameters; ``str`` draws a table.

    Attributes:
        rows: Rows in the order of the model.
        plan: Summary of an automatic plan; None for a user's plan.
    """

    rows: tuple[TensorRow, ...]
    plan: PlanSummary | None = None

    @property
    def num_bytes(self) -> int:
        """The number of bytes that this rank holds."""
        return sum(row.num_bytes for row in self.rows)

    def __str__(self) -> str:
        """Draws the table."""
        lines: list[tuple[str, ...]] = [
            ("parameters", "", "style", "whole", "on each rank", "", "bytes")
        ]
        for row in self.rows:
            count = "" if row.count == 1 else f"x{row.count}"
            whole, held = (" x ".join(map(str, shape)) for shape in (row.shape, row.held))
            num_bytes = f"{row.num_bytes:,}"
            lines.append((row.pattern, count, row.style, whole, held, row.placement, num_bytes))
        lines.append(("all", "", "", "", "", "", f"{self.num_bytes:,}"))
        table = draw_table(lines, right=(1, 6))
        return table if self.plan is None else f"{self.plan}\n{table}"


def summarise(
    module: nn.Module, styles: Mapping[str, Style], plan: PlanSummary | None = None
) -> TensorSummary:
    """Returns the summary of a sharded module."""
    rows: Counter[TensorRow] = Counter()
    for name, parameter in module.named_parameters():
        path, own = name.rpartition(".")[0], local_part(parameter)
        style = styles.get(path) or styles.get(projection_name(path))
        row = TensorRow(
            pattern=with_stars(name),
            count=1,
            style="" if style is None else style.value,
            shape=tuple(parameter.shape),
            held=tuple(own.shape),
            placement=_placement(parameter),
            num_bytes=own.numel() * own.element_size(),
        )
        rows[row] += 1
    counted = (replace(r, count=n, num_bytes=n * r.num_bytes) for r, n in rows.items())
    return TensorSummary(tuple(counted), plan)


def _placement(parameter: Tensor) -> str:
    if not isinstance(parameter, DTensor):
        return "replicated"
    axes = parameter.device_mesh.mesh_dim_names
    if axes is not None and "tp" not in axes:  # sharded over data ranks only
        return "replicated"
    dim = stacked_dim(parameter)
    if dim is not None:
        return f"stacked shards on dim {dim}"
    placement = parameter.placements[-1]
    return f"sharded on dim {placement.dim}" if isinstance(placement, Shard) else "replicated"
