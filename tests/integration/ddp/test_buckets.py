"""The buckets of gradients, as large as all gradients, exist only where replicas average them."""

from __future__ import annotations

import gc
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_dist import DDPStrategy
from tests.helpers.networks.models import Classifier, make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool
from tests.integration.ddp.test_local_sgd import Manual


def buckets_after_steps(count: int, kind: type[Classifier], options: dict[str, Any]) -> list[bool]:
    """Trains; returns for each step whether a wrapper, which owns the buckets, is alive."""
    gc.collect()  # those of earlier cases
    found = []

    def look(*_: Any) -> None:
        gc.collect()
        found.append(any(isinstance(o, DistributedDataParallel) for o in gc.get_objects()))

    module = make_module(kind)
    module.on_train_batch_end = look
    asked = {"limit_train_batches": 5, "limit_val_batches": 0, "max_epochs": 1}
    trainer = make_trainer(devices=count, strategy=DDPStrategy(**options), **asked)
    trainer.fit(module, make_loader(80, 8), make_loader(8))
    return found


def test_a_single_replica_has_none(workers: WorkerPool) -> None:
    for kind in (Classifier, Manual):
        (found,) = workers.run(1, buckets_after_steps, 1, kind, {})
        assert found == [False] * 5


def test_local_steps_have_none(workers: WorkerPool) -> None:
    options = {"sync_every": 2, "sync_warmup_steps": 2}
    for kind in (Classifier, Manual):
        for found in workers.run(2, buckets_after_steps, 2, kind, options):
            assert found == [True, True, False, False, False]
