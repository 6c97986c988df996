"""Notes that ranks leave for each other: nobody waits for them, or sends any without a reason.

They are in the store by which the processes have found each other. A rank that finds no note of
another one must know from elsewhere that it is not only late: a collective that needs something
from all ranks, which each of them gives after it has left its note.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_NUM_KEPT = 2
_POLL_SECONDS = 0.02


class RankNotes:
    """One rank's part in the notes of all: lists of numbers, one for each round.

    Args:
        store: In which all ranks look.
        name: The same on each rank, and never used before in the store.
        rank: This rank.
        ranks: All of them.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, ranks: Sequence[int]) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._own: list[str] = []

    def leave(self, round_index: int, numbers: Sequence[int]) -> None:
        """Leaves a note; those of the rounds before the last one are gone then.

        Args:
            round_index: Larger than that of the last note.
            numbers: What it says.
        """
        store, key = self._store, self._key(round_index, self._rank)
        store.set(key, json.dumps(list(numbers)))
        store.check([key])  # the answer comes when the note is there for others
        self._own.append(key)
        for old in self._own[:-_NUM_KEPT]:
            store.delete_key(old)
        del self._own[:-_NUM_KEPT]

    def common(self, round_index: int, numbers: Sequence[int]) -> list[int]:
        """Gives the numbers that are in the notes of all ranks.

        Args:
            round_index: Of the notes.
            numbers: What this rank's says.
        """
        found = set(numbers)
        for key in (self._key(round_index, rank) for rank in self._ranks):
            if not found or not self._store.check([key]):
                return []
            found &= set(json.loads(self._store.get(key)))
        return sorted(found)

    def await_common(self, round_index: int, numbers: Sequence[int], seconds: float) -> list[int]:
        """Waits for notes that may never come; see :meth:`common`.

        Args:
            round_index: Of the notes.
            numbers: What this rank's says.
            seconds: How long at most.
        """
        deadline = time.monotonic() + seconds
        while not (found := self.common(round_index, numbers)) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found

    def decide(self, round_index: int, proposal: bool) -> bool:
        """Returns what the first rank has proposed in a round, the same on all ranks.

        Args:
            round_index: Of the decision.
            proposal: This rank's.
        """
        key = f"{self._name}/{round_index}/decision"
        return self._store.compare_set(key, "", str(proposal)) == str(True).encode()

    def _key(self, round_index: int, rank: int) -> str:
        return f"{self._name}/{round_index}/{rank}"


def finish(device: torch.device) -> None:
    """Waits for the collectives that a device has been given; on a CPU whoever asked has waited.

    Args:
        device: Where they run.
    """
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
