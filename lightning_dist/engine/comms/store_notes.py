"""Notes that ranks leave for each other in the store, without waiting and only when needed.

The notes are in the store by which the processes have met. If a rank finds no note of another one,
it must know from elsewhere that the note is not merely late. A collective that each rank joins
after it has left its note tells that.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch.distributed as dist

_NUM_KEPT = 2
_POLL_SECONDS = 0.02


class RankNotes:
    """One rank's part in the notes of all: lists of numbers, one for each round.

    The name is the same on each rank, and was never used before in the store.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._own: list[str] = []

    def leave(self, round_index: int, numbers: Sequence[int]) -> None:
        """Leaves a note, and deletes this rank's notes of rounds before the previous one."""
        store, key = self._store, self._key(round_index, self._rank)
        store.set(key, json.dumps(list(numbers)))
        store.check([key])  # the answer comes when other ranks can see the note
        self._own.append(key)
        if len(self._own) > _NUM_KEPT:
            store.delete_key(self._own.pop(0))

    def common(self, round_index: int, numbers: Sequence[int]) -> list[int]:
        """Returns the numbers that are in the notes of all ranks."""
        # Two questions, however many ranks there are: all ranks ask the store at the same time.
        keys = [self._key(round_index, rank) for rank in self._ranks]
        if not numbers or not self._store.check(keys):
            return []
        notes = (set(json.loads(note)) for note in self._store.multi_get(keys))
        return sorted(set(numbers).intersection(*notes))

    def await_common(self, round_index: int, numbers: Sequence[int], seconds: float) -> list[int]:
        """Waits for notes that may never come; see :meth:`common`."""
        deadline = time.monotonic() + seconds
        while not (found := self.common(round_index, numbers)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found

    def decide(self, round_index: int, proposal: bool) -> bool:
        """Returns the proposal that came first in a round, the same on all ranks."""
        key = f"{self._name}/{round_index}/decision"
        return self._store.compare_set(key, "", str(proposal)) == str(True).encode()

    def _key(self, round_index: int, rank: int) -> str:
        return f"{self._name}/{round_index}/{rank}"
