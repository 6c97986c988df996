"""Counts the bytes that a data replica sends, and the time that the replica waits for averages.

When a replica's last bucket of gradients is complete, it has nothing left to compute. So a wait
begins then, and ends when the last average has arrived.
"""

# No postponed annotations here: torch compares those of a hook with its own classes.
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_dist.engine.data_parallel.compression import CommHook, Compressor
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.schedules.actions import Action, ActionKind
from lightning_dist.engine.schedules.timeline import SpanKind


class CommunicationMeter:
    """Counts the bytes that this rank sends, and its waits.

    Args:
        recorder: Records a span for each bucket and each wait.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_bytes = 0
        self._waits: list[tuple[Any, Any]] = []
        self._sent: Any = None
        self._is_last_sent = False
        self._arrived: Any = None
        self.update = 0

    def watch(self, compressor: Compressor) -> CommHook:
        """Returns a compressor's hook, with a measurement around it.

        Args:
            compressor: The compressor that averages a bucket.
        """

        def metered(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
            self._sent = start = self._recorder.mark()
            self._is_last_sent = bucket.is_last()
            future = compressor.hook(state, bucket)
            self._num_bytes += compressor.sent_bytes(bucket)

            def arrived(future: Future[Tensor]) -> Tensor:
                self._arrived = self._recorder.mark()
                self._recorder.record(SpanKind.COMMUNICATION, self._action, start, self._arrived)
                return future.value()

            return future.then(arrived)

        return metered

    @contextmanager
    def sending(self, num_bytes: int) -> Iterator[None]:
        """Returns a context manager that measures a blocking collective.

        Args:
            num_bytes: Bytes that this rank sends.

        Yields:
            Nothing.
        """
        start = self._recorder.mark()
        yield
        end = self._recorder.mark()
        self._num_bytes += num_bytes
        self._recorder.record(SpanKind.COMMUNICATION, self._action, start, end)
        self._note_wait(start, end)

    def end_backward(self) -> Any | None:
        """Records the wait at the end of a backward, if the backward has sent all gradients.

        If gradients are missing, the last bucket is sent and awaited after the backward.

        Returns:
            The mark of the wait's beginning; None if there was no wait.
        """
        if not self._is_last_sent:
            return None
        sent, self._sent, self._is_last_sent = self._sent, None, False
        self._note_wait(sent, self._arrived)
        return sent

    def _note_wait(self, start: Any, end: Any) -> None:
        self._waits.append((start, end))
        self._recorder.record(SpanKind.WAIT, self._action, start, end)

    @property
    def _action(self) -> Action:
        return Action(0, ActionKind.REDUCE_GRAD, self.update)

    def take(self) -> tuple[int, float]:
        """Returns the bytes and the seconds of waiting since the last call."""
        seconds = self._recorder.seconds
        waited = sum(seconds(end) - seconds(start) for start, end in self._waits)
        num_bytes, self._num_bytes = self._num_bytes, 0
        self._waits.clear()
        return num_bytes, waited
