from __future__ import annotations

import gc
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest
import torch
from lightning.pytorch.profilers import Profiler

from lightning_dist.callbacks import output
from lightning_dist.callbacks.loop_profiler import LoopProfiler
from lightning_dist.callbacks.output import print_tables
from lightning_dist.engine.common.table import Table
from lightning_dist.engine.profiling.meters.recorder import Recorder
from lightning_dist.engine.profiling.record import PhaseKind


class Users(Profiler):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []
        self.num_ends = 0

    def start(self, action_name: str) -> None:
        self.heard.append(f"+{action_name}")

    def stop(self, action_name: str) -> None:
        self.heard.append(f"-{action_name}")

    def teardown(self, stage: str | None) -> None:
        self.num_ends += 1

    def summary(self) -> str:
        return "theirs"


def loop_of(*, records_steps: bool = True) -> tuple[LoopProfiler, Users, Recorder]:
    users, recorder = Users(), Recorder(3, torch.device("cpu"))
    return LoopProfiler(users, recorder, records_steps=records_steps), users, recorder


def test_the_users_profiler_outlives_the_loops() -> None:
    """Lightning's profilers tear themselves down when they are freed."""
    loop, users, _ = loop_of()
    del loop
    gc.collect()
    assert users.num_ends == 0


def run_batch(loop: LoopProfiler) -> None:
    """What Lightning tells, as far as it matters, with other things between."""
    with loop.profile("[_TrainingEpochLoop].train_dataloader_next"):
        time.sleep(0.002)
    with loop.profile("run_training_batch"), loop.profile("[LightningModule]M.optimizer_step"):
        with loop.profile("[Strategy]S.training_step"):
            pass
        with loop.profile("[Strategy]S.backward"):
            pass
        with loop.profile("[LightningModule]M.on_before_optimizer_step"):
            pass
        loop.begin_update()
        time.sleep(0.002)
    with loop.profile("save_checkpoint"):
        pass


def test_what_is_told_becomes_phases_and_spans() -> None:
    loop, users, recorder = loop_of()
    recorder.keep()
    run_batch(loop)
    assert recorder.take() == () == loop.take()
    heard = list(users.heard)
    assert heard[-2:] == ["+save_checkpoint", "-save_checkpoint"]
    recorder.keep()
    loop.listens, loop.batch = True, 7
    run_batch(loop)
    assert users.heard == heard * 2  # the user's profiler hears it all, in the same order
    phases = loop.take()
    assert [phase.kind for phase in phases] == [PhaseKind.DATA_LOADING, PhaseKind.CHECKPOINT]
    assert phases[0].duration_seconds >= 0.002
    assert phases[0].rank == 3
    forward, backward, update = (span for _, span in recorder.take())
    assert [str(s.action) for s in (forward, backward, update)] == ["0F7", "0B7", "0STEP7"]
    assert backward.end_seconds <= update.start_seconds
    assert update.duration_seconds >= 0.002
    assert loop.summary() == "theirs"
    assert loop.take() == ()


def test_steps_that_somebody_else_records_are_left_to_them() -> None:
    loop, _, recorder = loop_of(records_steps=False)
    recorder.keep()
    loop.listens = True
    run_batch(loop)
    assert recorder.take() == ()
    assert len(loop.take()) == 2


def test_a_manual_backward_and_update_part_the_forward_that_they_are_inside_of() -> None:
    loop, _, recorder = loop_of()
    recorder.keep()
    loop.listens = True
    with loop.profile("[Strategy]S.training_step"):
        for _ in range(2):  # as with a generator and a discriminator
            loop.begin_backward()
            loop.end_backward()
            with loop.profile("optimizer_step"):
                loop.begin_update()
    spans = [span for _, span in recorder.take()]
    assert [str(span.action)[1:] for span in spans] == ["F0", "B0", "F0", "STEP0"] * 2 + ["F0"]
    assert all(a.end_seconds <= b.start_seconds for a, b in zip(spans, spans[1:], strict=False))


TABLE = Table("Sizes", ("name", "size"), (("a", "1"), ("long", "20")), frozenset({1}))


def test_tables_are_printed_without_rich_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    print_tables([TABLE], "Done.")
    drawn = capsys.readouterr().out
    assert "│ long │   20 │" in drawn
    assert drawn.endswith("Done.\n")

    def find(name: str) -> ModuleSpec | None:
        return None if name == "rich" else find_spec(name)

    monkeypatch.setattr(output, "find_spec", find)
    print_tables([TABLE], "Done.")
    assert capsys.readouterr().out == "Sizes\nname  size\na        1\nlong    20\n\nDone.\n"


def test_a_wide_table_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    wide = Table("Wide", tuple("abcdefgh"), (("0123456789abcdef",) * 8,))
    print_tables([wide])
    assert capsys.readouterr().out.count("0123456789abcdef") == 8


def test_a_long_text_is_folded(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = "many words and " * 12
    print_tables([Table("", ("", ""), (("input", sentence), ("steps", "10")))])
    drawn = capsys.readouterr().out
    assert max(map(len, drawn.splitlines())) <= 88
    assert drawn.count("many") == drawn.count("words") == drawn.count("and") == 12
