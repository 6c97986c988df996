"""Finds the weight of a batch whose micro-batches were logged with a ``batch_size`` of the user's.

A step that logs ``batch_size=len(y)``, or its number of tokens, counts what is in the micro-batch;
the batch has the sum. One that logs ``batch_size=1``, or the loader's batch size, gives a constant;
the batch then weighs the same however many micro-batches it has. The numbers of one batch with
equal micro-batches do not tell the two apart, and need not: only how batches weigh beside each
other matters. A batch that is cut otherwise has micro-batches of another size, which tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class GivenSize:
    """The sizes that one ``self.log`` call has given so far.

    Attributes:
        counts: Whether they count what is in a micro-batch; None while that is unknown.
        num_pieces: Micro-batches of the first batch.
        rows: Of the first micro-batch.
        given: For that one.
    """

    counts: bool | None = None
    num_pieces: int = 0
    rows: int = 0
    given: float = 0.0

    def weights_of(self, rows: Sequence[int], given: Sequence[float]) -> tuple[list[float], float]:
        """Notes the sizes of a batch.

        Args:
            rows: Samples of each micro-batch.
            given: What the user says for each.

        Returns:
            What each micro-batch weighs in the batch, and the batch among others.
        """
        if not self.num_pieces:
            self.num_pieces, self.rows, self.given = len(rows), rows[0], given[0]
        if any(size != self.given for size in given):
            self.counts = True
        elif self.counts is None and any(number != self.rows for number in rows):
            self.counts = False
        if self._counts_likely():
            return list(given), sum(given)
        return [float(number) for number in rows], self.given * self.num_pieces

    def _counts_likely(self) -> bool:
        if self.counts is not None:
            return self.counts
        # As yet all micro-batches have been equal. Weights are, too, but for a smaller batch's.
        is_batch_size = self.given == self.rows * self.num_pieces
        return not is_batch_size or self.num_pieces == 1
