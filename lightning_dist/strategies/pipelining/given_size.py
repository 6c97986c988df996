"""Find the weight of a batch whose micro-batches were logged with a user's ``batch_size``.

``batch_size=len(y)`` counts items of the micro-batch; the batch weighs their sum. ``batch_size=1``
is a constant; the batch weighs the same however many micro-batches it has. One batch with equal
micro-batches does not tell the two apart, and need not, for only weights relative to other batches
matter. A batch that is cut otherwise tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class GivenSize:
    """The sizes that one ``self.log`` call has given so far.

    Attributes:
        counts: Whether the sizes count items of a micro-batch; None while that is unknown.
        num_pieces: Number of micro-batches of the first batch.
        rows: Number of samples in the first micro-batch.
        given: The given size of the first micro-batch.
    """

    counts: bool | None = None
    num_pieces: int = 0
    rows: int = 0
    given: float = 0.0

    def weights_of(self, rows: Sequence[int], given: Sequence[float]) -> tuple[list[float], float]:
        """Returns the weights of a batch and its micro-batches, and remembers its sizes.

        Args:
            rows: Number of samples in each micro-batch.
            given: The user's ``batch_size`` of each micro-batch.

        Returns:
            The weight of each micro-batch in the batch, and of the batch among others.
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
        # So far all micro-batches were equal. Their weights are, too, but for a smaller batch.
        is_batch_size = self.given == self.rows * self.num_pieces
        return not is_batch_size or self.num_pieces == 1
