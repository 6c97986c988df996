"""Each of a table of runs is under its strategy what it is on one device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.differential.case import Case
from tests.differential.check import RefusedError, find_differences
from tests.differential.compare import differences
from tests.differential.dials.models import OF_UNUSED_PARAMETERS, SENDS_ZEROS
from tests.differential.dials.strategies import STRATEGIES
from tests.differential.fixed import FIXED, NOT_YET, Fixed
from tests.differential.observe import files_in
from tests.differential.run import run_rank, run_reference
from tests.differential.script import script_of
from tests.helpers.processes.workers import WorkerPool


def _parameters() -> list[object]:
    return [
        pytest.param(
            fixed,
            id=name,
            marks=[pytest.mark.xfail(strict=True, reason=NOT_YET[name])] if name in NOT_YET else [],
        )
        for name, fixed in FIXED.items()
    ]


# Of cases that differ in their schedule or layout, one runs; the others with --all.
@pytest.mark.some(
    "2bw, a shared parameter",
    "a batch size of one given, *",
    "a block that three stages share, frozen at first",
    "a callback that stops at nan",
    "a list with a tensor for each sample",
    "a teacher that is never run, *",
    "a teacher whose biases keep their sums",
    "a teacher, validated while gradients accumulate",
    "a traced module's step uses a parameter, with hooks",
    "a warm-up by hand, a second fit, asynchronous",
    "anomaly detection, sharded layers",
    "arrays beside tensors, stages",
    "batches of two loaders, from a data module",
    "checkpoint names differ by rank, stages",
    "counters in groups are tensors, servers",
    "experts, accumulated in half precision, shards",
    "experts, half precision, shards of stages",
    "experts, replicas",
    "experts, sharded stages in half precision",
    "hooks of a weighted mean's gradient, *",
    "hooks of a whole gradient that stages share, 2bw",
    "hooks of accumulated gradients, 2bw",
    "hooks of layers, pipedream",
    "hooks of parameters, built late, replicas",
    "one estimate for all parameters, pipedream",
    "outputs of the first batches",
    "predicts a list *",
    "reductions are over batches",
    "renamed in checkpoints, shards",
    "renamed in checkpoints, traced stages",
    "replicas, a backbone *",
    "resumes an average of a shared parameter",
    "resumes what one device has begun, stages",
    "sparse gradients, *",
    "stages resume in the middle of an epoch",
    "stages, all hooks",
    "stages, running statistics",
    "tags of parameters, built late, shards, a second Trainer",
    "texts of other lengths *",
    "the first rank alone stops, asynchronous",
    "the last batch of an epoch stops, asynchronous",
    "the step penalizes the head, vertical sync",
    "the step steps two optimizers, shards",
    "unfrozen shards, half precision",
    "unfrozen while stages fill, *",
    "values of batches in flight at a drain",
)
@pytest.mark.parametrize("fixed", _parameters())
def test_is_as_on_one_device(workers: WorkerPool, fixed: Fixed) -> None:
    is_sharded = STRATEGIES[fixed.case.strategy].is_sharded
    if is_sharded and fixed.case.model in OF_UNUSED_PARAMETERS and not SENDS_ZEROS:
        pytest.skip("FSDP2 sends zeros since torch 2.13")
    if fixed.refusal is not None:
        with pytest.raises(RefusedError, match=fixed.refusal):
            find_differences(fixed.case, workers)
        return
    found = find_differences(fixed.case, workers)
    assert not found, "\n".join([*found, script_of(fixed.case)])


@pytest.mark.long
def test_logging_before_the_model_leaves_nothing(workers: WorkerPool, tmp_path: Path) -> None:
    """A stage that does not come to the end of a step hears of what is logged at its beginning."""
    case = Case("1f1b_auto", num_batches=150, log_every_n_steps=1000, limit_val_batches=0)
    without, growing = (
        [seen.growth for seen in workers.run(2, run_rank, each, str(tmp_path))]
        for each in (case, replace(case, logs=("before",)))
    )
    for before, after in zip(without, growing, strict=True):
        assert after - before < SPARE_BLOCKS


SPARE_BLOCKS = 4
PLAIN = Case(logs=("loss",), callbacks=("every_steps", "count"), epochs=2)


@pytest.mark.some("*strategy='pipedream'*", "*val_check_interval=2*")
@pytest.mark.parametrize(
    "other",
    [
        replace(PLAIN, strategy="pipedream"),
        replace(PLAIN, strategy="vertical_sync"),
        replace(PLAIN, optimizer="adamw"),
        replace(PLAIN, scheduler="exponential_step"),
        replace(PLAIN, clip=("norm", 0.05)),
        replace(PLAIN, parameter_hooks=("mask",)),
        replace(PLAIN, data="shuffled"),
        replace(PLAIN, log_every_n_steps=2),
        replace(PLAIN, callbacks=("count", "stop")),
        replace(PLAIN, val_check_interval=2),
    ],
    ids=repr,
)
def test_the_comparison_can_fail(tmp_path: Path, other: Case) -> None:
    folders = [tmp_path / name / "run" for name in ("one", "same", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    runs = zip((PLAIN, PLAIN, other), folders, strict=True)
    one, same, changed = (run_reference(case, str(folder)) for case, folder in runs)
    files, _, other_files = map(files_in, folders)
    assert not differences(PLAIN, [same, same], files, one, files)
    assert differences(PLAIN, [changed, changed], other_files, one, files)


def test_a_case_is_a_script() -> None:
    case = FIXED["stages, all hooks"].case
    assert repr(case) in script_of(case)
    assert eval(repr(case)) == case
    assert repr(Case()) == "Case()"
