"""The joined measurements of all ranks: the results, and the numbers for loggers.

MFU (Chowdhery et al., 2022, appendix B) is a run's share of the devices' peaks of dense matrix
products. A device that is not listed has no MFU, and a CPU never has one. What activation
checkpointing computes again counts, too; without that it would be lower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median_low
from typing import NamedTuple

from lightning_dist.engine.planning.devices import find_peak_flops
from lightning_dist.engine.planning.layer_costs import LayerCosts
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.engine.profiling.account import Account, Use, account_for
from lightning_dist.engine.profiling.bubble import (
    measured_bubble,
    measured_costs,
    predicted_timeline,
)
from lightning_dist.engine.profiling.record import ClockOffset, RankPlace, RankRecord
from lightning_dist.engine.schedules.timeline import Timeline

_STRAGGLES = 1.15
"""A straggler takes at least this many times as long as ranks with the same work, ..."""
_FELT = 0.05
"""... and longer by at least this share of a step."""
_INPUT_BOUND = 0.1
"""A run is input-bound if a rank waits for its batches at least this share of a step."""


class Straggler(NamedTuple):
    """A rank that computes longer than others with the same work, and its time over theirs."""

    place: RankPlace
    ratio: float

    def __str__(self) -> str:
        """Returns the rank, its host and the ratio as text."""
        return f"rank {self.place.rank} on {self.place.host} ({self.ratio:.2f} x its peers)"


class InputWait(NamedTuple):
    """A rank's wait for its batches, as a share of a step."""

    place: RankPlace
    share: float

    @property
    def is_input_bound(self) -> bool:
        """Whether the wait is long enough to say that the input bounds the run."""
        return self.share >= _INPUT_BOUND

    def __str__(self) -> str:
        """Returns the wait as text, with what to change if the run is input-bound."""
        text = f"rank {self.place.rank} waits {self.share:.0%} of a step for its batches"
        if not self.is_input_bound:
            return text
        return (
            f"bounds the run: {text}. Raise num_workers or prefetch_factor of the loader, or"
            " prepare samples ahead: decoded, tokenised, packed"
        )


@dataclass(frozen=True)
class ProfileReport:
    """The profile of some training steps of all ranks.

    Attributes:
        records: Records by rank, on the clock of rank 0.
        offsets: Offset of each rank's clock from that of rank 0.
        first_batch: Index of the first step's batch.
    """

    records: tuple[RankRecord, ...]
    offsets: tuple[ClockOffset, ...]
    first_batch: int = 0

    @classmethod
    def join(
        cls, records: Sequence[RankRecord], offsets: Sequence[ClockOffset], first_batch: int
    ) -> ProfileReport:
        """Creates the report of records by rank, each on its own clock, on the clock of rank 0."""
        pairs = zip(records, offsets, strict=True)
        moved = tuple(record.on_clock(offset) for record, offset in pairs)
        return cls(moved, tuple(offsets), first_batch)

    def batches(self, count: int | None = None) -> str:
        """Returns a text with the first ``count`` timed batches, or all."""
        number = self.num_steps if count is None else count
        first, last = self.first_batch, self.first_batch + number - 1
        return f"batch {first}" if number == 1 else f"batches {first} to {last}"

    @property
    def memory_title(self) -> str:
        """Title of tables and pictures of memory, which is a peak of the run so far."""
        return f"Memory at its peak, up to batch {self.first_batch + self.num_steps - 1}"

    # --- time --------------------------------------------------------------------------------

    @cached_property
    def accounts(self) -> tuple[Account, ...]:
        """The uses of each rank's time."""
        return tuple(account_for(record) for record in self.records)

    @property
    def num_steps(self) -> int:
        """Number of timed steps."""
        return len(self.records[0].steps)

    @property
    def step_seconds(self) -> float:
        """Time of a step, on average over steps and ranks."""
        return fmean(account.step_seconds for account in self.accounts)

    def share(self, use: Use) -> float:
        """Returns the share of the ranks' time that had a use."""
        return fmean(account.seconds[use] for account in self.accounts) / self.step_seconds

    @cached_property
    def timeline(self) -> Timeline:
        """The spans of all ranks, on one clock."""
        spans = tuple(span for record in self.records for span in record.spans)
        return Timeline(len(self.records), spans)

    @cached_property
    def predicted_timeline(self) -> Timeline | None:
        """The simulator's timeline for the measured costs; None without a pipeline."""
        shape = self.records[0].place.shape
        if shape is None:
            return None
        costs = measured_costs(self.timeline.spans, shape.num_stages)
        return None if costs is None else predicted_timeline(shape, costs)

    @cached_property
    def bubble_fraction(self) -> float | None:
        """The measured bubble; None without a pipeline."""
        shape = self.records[0].place.shape
        return None if shape is None else measured_bubble(self.records, shape)

    @property
    def predicted_bubble_fraction(self) -> float | None:
        """The simulator's bubble for the measured costs; None without a pipeline."""
        timeline = self.predicted_timeline
        return None if timeline is None else timeline.bubble_fraction

    @cached_property
    def slowest(self) -> RankPlace:
        """The rank that computes longest, for which the others wait."""
        seconds = [account.compute_seconds for account in self.accounts]
        return self.records[seconds.index(max(seconds))].place

    @cached_property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Ranks that take clearly longer than others with the same work, slowest first."""
        groups: dict[int, list[int]] = {}
        for rank, record in enumerate(self.records):
            groups.setdefault(record.place.stage_group, []).append(rank)
        found = []
        for ranks in groups.values():
            seconds = [self.accounts[rank].compute_seconds for rank in ranks]
            typical = median_low(seconds)
            for rank, own in zip(ranks, seconds, strict=True):
                is_felt = own - typical >= _FELT * self.step_seconds
                if typical > 0 and own / typical >= _STRAGGLES and is_felt:
                    found.append(Straggler(self.records[rank].place, own / typical))
        return tuple(sorted(found, key=lambda straggler: -straggler.ratio))

    @cached_property
    def input_wait(self) -> InputWait:
        """The longest wait of a rank for its batches.

        The first rank of each data replica reads. The others' waits are for that rank, which may
        be busy with a step.
        """
        readers: dict[int, int] = {}
        for rank, record in enumerate(self.records):
            readers.setdefault(record.place.data_index, rank)
        share = {
            rank: self.accounts[rank].seconds[Use.DATA_LOADING] / self.accounts[rank].step_seconds
            for rank in readers.values()
        }
        slowest = max(share, key=lambda rank: share[rank])
        return InputWait(self.records[slowest].place, share[slowest])

    # --- work --------------------------------------------------------------------------------

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all ranks that read different data."""
        return self._per_second([record.num_samples for record in self.records])

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all ranks that read different data; None if they are unknown."""
        counts = [record.num_tokens for record in self.records]
        known = [count for count in counts if count is not None]
        return self._per_second(known) if len(known) == len(counts) else None

    def _per_second(self, counts: Sequence[int]) -> float:
        places = [record.place.data_index for record in self.records]
        by_data = dict(zip(places, counts, strict=True))
        return sum(by_data.values()) / (self.num_steps * self.step_seconds)

    @property
    def flops(self) -> int:
        """FLOPs of a step, on all ranks together."""
        return sum(record.count.flops for record in self.records)

    @property
    def mfu(self) -> float | None:
        """The run's share of the devices' peak FLOPs; None if a peak is unknown."""
        places = [record.place for record in self.records]
        peaks = [find_peak_flops(place.device, place.precision) for place in places]
        known = [peak for peak in peaks if peak is not None]
        if len(known) < len(peaks):
            return None
        return self.flops / self.step_seconds / sum(known)

    @cached_property
    def bytes_by_kind(self) -> dict[MessageKind, int]:
        """Bytes of a step's messages by kind, on all ranks together."""
        counts: Counter[MessageKind] = Counter()
        for record in self.records:
            for traffic in record.count.traffic:
                counts[traffic.kind] += traffic.num_bytes
        return dict(counts)

    @property
    def exposed_share(self) -> float | None:
        """Share of a traced step's collectives that no compute hid; None without any."""
        found = [record.exposure for record in self.records if record.exposure is not None]
        total = sum(exposure.seconds for exposure in found)
        return sum(e.exposed_seconds for e in found) / total if total else None

    @cached_property
    def layers(self) -> tuple[LayerCosts, ...]:
        """Costs of the layers for a micro-batch, in order; empty if they were not timed."""
        found = {i: costs for record in self.records for i, costs in record.layers.items()}
        return tuple(found[index] for index in sorted(found))

    # --- numbers -----------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers for loggers, the same on all ranks."""
        memory = [record.memory for record in self.records]
        known = {
            "bubble_fraction": self.bubble_fraction,
            "predicted_bubble_fraction": self.predicted_bubble_fraction,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "exposed_communication_share": self.exposed_share,
        }
        numbers = {
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "flops_per_second": self.flops / self.step_seconds,
            "communication_bytes": float(sum(self.bytes_by_kind.values())),
            "peak_bytes": float(max(use.measured.peak for use in memory)),
            "slowest_rank": float(self.slowest.rank),
            "num_stragglers": float(len(self.stragglers)),
            "input_wait": self.input_wait.share,
            **{f"{use.replace(' ', '_')}_share": self.share(use) for use in Use},
            **{name: value for name, value in known.items() if value is not None},
        }
        return {f"profile/{name}": value for name, value in numbers.items()}
