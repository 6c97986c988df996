"""A checkpoint means the same under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_dist import PipelineStrategy
from lightning_dist.__main__ import main
from lightning_dist.checkpoint import is_sharded, load_full
from tests.helpers.networks.models import make_loader, make_module, make_trainer, state_of
from tests.helpers.processes.workers import WorkerPool


def train(
    devices: int,
    strategy: dict[str, Any] | None,
    epochs: int,
    resume: str | None,
    save: str | None,
    dropout: float = 0.0,
) -> Any:
    """Trains up to an epoch, from a checkpoint or from the start, and saves at the end."""
    module = make_module(optimizer="adamw", schedule_lr=True, dropout=dropout)
    trainer = make_trainer(
        devices=devices,
        strategy="auto" if strategy is None else PipelineStrategy(**strategy),
        max_epochs=epochs,
        limit_val_batches=1,
    )
    trainer.fit(module, make_loader(), make_loader(16), ckpt_path=resume, weights_only=True)
    if save is not None:
        trainer.save_checkpoint(save)
    return state_of(module)


def merged(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: value for state in states for name, value in state.items()}


def assert_close(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert float((value - expected[name]).abs().max()) <= tolerance, name


SYNC = {"schedule": "1f1b", "num_microbatches": 2}
ASYNC = {"schedule": "pipedream"}
LATE = {"schedule": "pipedream_2bw", "num_microbatches": 2}


@pytest.fixture(scope="module")
def trained(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Checkpoints after one epoch by different layouts, and the state after two."""
    root = tmp_path_factory.mktemp("trained")
    names = ("sharded", "full", "plain", "v_placement")
    sharded, full, plain, v_placement = (str(root / f"{n}.ckpt") for n in names)
    workers.run(2, train, 2, {**SYNC, "schedule": "zbv"}, 1, None, v_placement)
    workers.run(2, train, 2, SYNC, 1, None, sharded)
    workers.run(2, train, 2, {**SYNC, "save_full": True}, 1, None, full)
    train(1, None, 1, None, plain)
    return {
        "sharded": sharded,
        "full": full,
        "plain": plain,
        "v_placement": v_placement,
        "after_two": train(1, None, 2, None, None),
    }


@pytest.mark.some("1 stage-v_placement")
@pytest.mark.parametrize("form", ["sharded", "full", "plain", "v_placement"])
@pytest.mark.parametrize(
    ("devices", "strategy"),
    [
        (1, SYNC),
        (2, {**SYNC, "partition": [3, 5]}),
        (4, {**SYNC, "schedule": "gpipe"}),
        (4, {**SYNC, "num_stages": 2}),
        (2, {**SYNC, "schedule": "interleaved_1f1b"}),
        (2, {**SYNC, "schedule": "zbv"}),
    ],
    ids=["1 stage", "2 other stages", "4 stages", "2 stages, 2 replicas", "4 looped", "4 in a V"],
)
def test_resumes_on_any_number_of_stages(
    workers: WorkerPool,
    trained: dict[str, Any],
    form: str,
    devices: int,
    strategy: dict[str, Any],
) -> None:
    states = workers.run(devices, train, devices, strategy, 2, trained[form], None)
    assert_close(merged(states), trained["after_two"], 1e-12)


def test_a_sharded_checkpoint_resumes_on_a_plain_trainer(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    assert is_sharded(trained["sharded"])
    target = tmp_path / "merged.ckpt"
    main(["merge", trained["sharded"], str(target)])
    state = train(1, None, 2, str(target), None)
    assert_close(state, trained["after_two"], 1e-12)


def test_both_forms_load_as_the_ordinary_dictionary(trained: dict[str, Any]) -> None:
    sharded, full, plain = (load_full(trained[form]) for form in ("sharded", "full", "plain"))
    assert sharded.keys() == full.keys() == plain.keys()
    for form in (sharded, full):
        assert form["state_dict"].keys() == plain["state_dict"].keys()
        for key in ("epoch", "global_step", "lr_schedulers"):
            assert form[key] == plain[key]
        ours, theirs = form["optimizer_states"][0], plain["optimizer_states"][0]
        assert ours["param_groups"] == theirs["param_groups"]
        assert ours["state"].keys() == theirs["state"].keys()
        for number, entries in theirs["state"].items():
            assert ours["state"][number].keys() == entries.keys()
            for name, value in entries.items():
                torch.testing.assert_close(ours["state"][number][name], value, rtol=0, atol=1e-12)


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("strategy", [SYNC, ASYNC, LATE], ids=["1f1b", "pipedream", "2bw"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    workers: WorkerPool, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    path = str(tmp_path / "middle.ckpt")
    workers.run(3, train, 3, strategy, 1, None, path, 0.2)
    resumed = workers.run(3, train, 3, strategy, 2, path, None, 0.2)
    through = workers.run(3, train, 3, strategy, 2, None, None, 0.2)
    assert_close(merged(resumed), merged(through), 0.0)
    without = workers.run(3, train, 3, strategy, 2, path, None, 0.0)
    assert any(not torch.equal(merged(without)[n], v) for n, v in merged(through).items())


def train_with_callback(devices: int, root: str, schedule: str) -> Any:
    checkpoint = ModelCheckpoint(root, monitor="val_loss", save_top_k=1, save_last=True)
    module = make_module()
    trainer = make_trainer(
        devices=devices,
        strategy=PipelineStrategy(schedule=schedule),
        callbacks=[checkpoint],
        enable_checkpointing=True,
        max_epochs=3,
    )
    trainer.fit(module, make_loader(), make_loader())
    best = checkpoint.best_model_path
    score = float(checkpoint.best_model_score)
    trainer.validate(module, make_loader(), ckpt_path="best", verbose=False)
    return best, score, float(trainer.callback_metrics["val_loss"]), state_of(module)


@pytest.mark.some("pipedream")
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_model_checkpoint_keeps_the_best(
    workers: WorkerPool, tmp_path: Path, schedule: str
) -> None:
    ranks = workers.run(2, train_with_callback, 2, str(tmp_path), schedule)
    best, score, validated, _ = ranks[0]
    assert ranks[1][:3] == ranks[0][:3]
    assert validated == pytest.approx(score, abs=1e-12)
    assert {p.name for p in tmp_path.iterdir()} == {Path(best).name, "last.ckpt"}
    loaded = load_full(best)["state_dict"]
    assert_close(loaded, merged([state for *_, state in ranks]), 0.0)
