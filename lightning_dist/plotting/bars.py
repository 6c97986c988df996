"""What the bars of a profile show, for a picture and for a page alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from lightning_dist.engine.common.quantity import scale_of_bytes
from lightning_dist.engine.planning.memory import RankMemory
from lightning_dist.engine.profiling.account import Use
from lightning_dist.engine.profiling.report import ProfileReport
from lightning_dist.plotting.colours import OF_MEMORY, OF_USES


@dataclass(frozen=True, slots=True)
class Bars:
    """Stacked bars.

    Attributes:
        rows: By name, what a bar is made of, by kind.
        colours: Of the kinds, in their order.
        unit: Of the values.
    """

    rows: Mapping[str, Mapping[str, float]]
    colours: Mapping[str, str]
    unit: str

    @classmethod
    def of_uses(cls, report: ProfileReport) -> Bars:
        """Gives where the time of each rank's step goes.

        Args:
            report: Of all ranks.
        """
        rows = {
            f"rank {record.place.rank}": {use.value: s * 1e3 for use, s in account.seconds.items()}
            for record, account in zip(report.records, report.accounts, strict=True)
        }
        return cls(rows, {use.value: OF_USES[use] for use in Use}, "ms per step")

    @classmethod
    def of_memory(cls, report: ProfileReport) -> Bars:
        """Gives what each rank holds, and was predicted to.

        Args:
            report: Of all ranks.
        """
        rows: dict[str, dict[str, float]] = {}
        for record in report.records:
            rank = f"rank {record.place.rank}"
            rows[rank] = _bytes_by_kind(record.memory.measured)
            if record.memory.predicted is not None:
                rows[f"{rank}, predicted"] = _bytes_by_kind(record.memory.predicted)
        scale, unit = scale_of_bytes(max(sum(row.values()) for row in rows.values()))
        scaled = {name: {kind: b / scale for kind, b in row.items()} for name, row in rows.items()}
        return cls(scaled, {_named(kind): colour for kind, colour in OF_MEMORY.items()}, unit)


def _bytes_by_kind(memory: RankMemory) -> dict[str, float]:
    return {_named(field.name): getattr(memory, field.name) for field in fields(memory)}


def _named(kind: str) -> str:
    return kind.replace("_", " ")
