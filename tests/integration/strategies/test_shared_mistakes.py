"""A mistake that all ranks make is shown once, without the frames of the libraries."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr

import pytest

from lightning_dist import FSDPStrategy
from lightning_dist.wrap import ByClass
from tests.helpers.networks.models import make_loader, make_module, make_trainer
from tests.helpers.processes.workers import WorkerPool


def shown_by(name: str) -> str:
    """What the interpreter prints, were the process to end with the mistake."""
    strategy = FSDPStrategy(wrap=ByClass([name]))
    trainer = make_trainer(devices=2, strategy=strategy)
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as shown:
        patch.setattr(sys, "excepthook", sys.excepthook)
        try:
            trainer.fit(make_module(), make_loader(8), make_loader(8))
        except ValueError as error:
            sys.excepthook(type(error), error, error.__traceback__)
    return shown.getvalue()


def test_a_mistake_of_all_ranks_is_shown_once(workers: WorkerPool) -> None:
    first, second = workers.run(2, shown_by, "Nosuch")
    lines = first.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("ValueError: The class 'Nosuch' fits no module")
    assert len(lines) == 4  # and the frame of this test
    assert second == ""
