"""Ranks of a pipeline as threads of this process: milliseconds, where processes take seconds.

Threads share torch's generators, so only one of them runs, until it waits for a message. Without
turns they draw each other's numbers, and now and then wait for ever: torch holds a generator's lock
while it makes a tensor of its state, and what frees garbage there lets another thread go on, which
asks for that lock with Python's in its hand.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.comms.connect import connect_in_memory
from lightning_dist.engine.comms.links import Links
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.pipeline.stages import StageOptions
from lightning_dist.engine.schedules.registry import PipelineShape

Train = Callable[[nn.Sequential, Pipeline], Any]
"""Trains a rank's stages; gets the model as it was, without the layers of other ranks."""


class Yielding(MemoryChannel):
    """Lets others run while it waits."""

    def __init__(self, turn: threading.Lock) -> None:
        super().__init__()
        self._turn = turn

    def receive(self, *, tag: int = 0, key: Hashable = None) -> Any:
        self._turn.release()
        try:
            return super().receive(tag=tag, key=key)
        finally:
            self._turn.acquire()


def connect_turns(homes: Sequence[int], turn: threading.Lock) -> list[Links]:
    """Connects ranks that run while they hold a lock, which they let go while they wait.

    Args:
        homes: The rank of each stage.
        turn: The lock.
    """
    return connect_in_memory(homes, partial(Yielding, turn))


def run_ranks(
    make: Callable[[], nn.Sequential],
    shapes: Sequence[PipelineShape],
    train: Train,
    turn: threading.Lock | None = None,
    seconds: float = 30,
    **options: Any,
) -> list[Any]:
    """Runs a rank for each shape at once, and gives what each returned in so many seconds.

    Channels of the caller's own are :class:`Yielding` ones of the same turn.
    """
    turn = turn or threading.Lock()
    links = connect_turns(shapes[0].rank_of_stage, turn)
    models = [make() for _ in shapes]
    results: dict[int, Any] = {}
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # of this thread; more of them than cores wait for each other
        try:
            with turn:
                pipeline = Pipeline(
                    models[rank], shapes[rank], links[rank], StageOptions(**options)
                )
                results[rank] = train(models[rank], pipeline)
        except BaseException as error:
            failures.append(error)
            for end in links:
                end.interrupt(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    if stuck and not failures:
        # The runtime adds to the error in which action of the schedule a rank was waiting.
        error = TimeoutError(f"Ranks {stuck} have not ended in {seconds:g} seconds.")
        for end in links:
            end.interrupt(error)
        for rank in stuck:
            threads[rank].join(seconds)
        raise error from next((late for late in failures if late is not error), None)
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(len(shapes))]


def shapes_of(
    schedule: str, num_microbatches: int, layers_per_stage: tuple[int, ...], num_ranks: int = 2
) -> list[PipelineShape]:
    """Gives all ranks of a pipeline."""
    per_rank = len(layers_per_stage) // num_ranks
    return [
        PipelineShape(schedule, num_microbatches, layers_per_stage, rank, per_rank)
        for rank in range(num_ranks)
    ]


def train_with(
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    batches: Sequence[Any],
    step: Callable[[nn.Module, Any], Any],
    accumulate: int = 1,
    reduce: Callable[[nn.Module], None] = lambda _: None,
    clear_every: int = 1,
) -> Train:
    """Makes the loop of a rank; it gives the state that the rank holds.

    Gradients of ``clear_every`` updates are added up before they are cleared.
    """

    def train(model: nn.Sequential, pipeline: Pipeline) -> dict[str, Tensor]:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = make_optimizer(parameters or [nn.Parameter(torch.zeros(()))])

        updates = itertools.count(1)

        def update() -> None:
            early = pipeline.update_rule.completes_early
            pipeline.install_gradients(None if early else lambda: reduce(model))
            with pipeline.updating():
                optimizer.step()
            if next(updates) % clear_every == 0:
                optimizer.zero_grad()

        for number, batch in enumerate(batches, 1):
            scale = 1.0 / accumulate
            pipeline.train_batch(batch, lambda m: step(model, m.content), gradient_scale=scale)
            if number % accumulate:
                pipeline.install_gradients(is_complete=False)
            elif pipeline.has_gradients:
                update()
        for _ in pipeline.drain():
            update()
        return {name: value.clone() for name, value in model.state_dict().items()}

    return train
