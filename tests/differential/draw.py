"""Draw cases, and leave out what a strategy says that it refuses."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from tests.differential.case import ROUGH_PRECISIONS, Case
from tests.differential.dials.callbacks import CALLBACKS
from tests.differential.dials.data import LOADERS, OF_ONE_READER
from tests.differential.dials.layer_hooks import LAYER_HOOKS
from tests.differential.dials.models import (
    MODELS,
    OF_SHARED_PARAMETERS,
    OF_UNUSED_PARAMETERS,
    PARAMETER_HOOKS,
    SENDS_ZEROS,
)
from tests.differential.dials.module import (
    KEEPS,
    LOGS,
    OF_OUTPUTS,
    OF_PIECES,
    OF_STAGES,
    OF_WHOLE_BATCHES,
    OF_WHOLE_STEPS,
)
from tests.differential.dials.optimizers import OPTIMIZERS, SCHEDULERS
from tests.differential.dials.strategies import STRATEGIES, Entry
from tests.differential.run import TRAINER_OPTIONS

# What needs the whole model on each rank.
OF_WHOLE_MODELS = ("finetune", "ema", "swa")
OF_WHOLE_GRADIENTS = ("clamp",)
OF_VALIDATION = ("best", "early")
# What values in half precision, rounded otherwise, may decide otherwise, or put into a name.
OF_EXACT_VALUES = ("best", "train_best", "early", "early_train")
OF_EXACT_LOGS = ("metric", "count")
OF_LOGGED_LOSS = ("train_best", "early_train")
# Strategies under which a module may step its optimizers by itself.
OF_MANUAL_STEPS = ("ddp", "fsdp", "fsdp_gradients", "fsdp_optimizer", "replicas_of_shards")
OF_AUTOMATIC_STEPS = ("accumulate_later", "swa", "finetune")


def _models(entry: Entry) -> list[str]:
    left_out = set()
    if entry.replicas > 1 or entry.microbatches > 1:
        left_out.add("batch_norms")
    if entry.versions in ("stash", "vertical_sync"):
        left_out |= set(OF_SHARED_PARAMETERS)
    if math.isinf(entry.tolerance):
        left_out.add("experts")  # replicas that step by themselves use others
    if entry.is_sharded:
        left_out.add("in_place")  # FSDP2's units must not write into their inputs
        left_out |= set() if SENDS_ZEROS else set(OF_UNUSED_PARAMETERS)
    return [name for name in MODELS if name not in left_out]


def _optimizers(entry: Entry) -> list[str]:
    """An estimate from all parameters is not had where a rank's optimizer has some of them."""
    in_parts = entry.is_pipeline or entry.averages_behind_hooks
    return sorted(OPTIMIZERS.keys() - {"one_estimate"} if in_parts else OPTIMIZERS)


def _callbacks(name: str, entry: Entry) -> list[str]:
    left_out = {"own_names"} if entry.replicas > 1 else set()
    if name != "ddp":
        left_out |= set(OF_WHOLE_MODELS)
    if entry.versions is not None:
        left_out |= {"average", "accumulate_later", "clamp_weights"}
    if name == "server":  # its weights are those of the servers after each step
        left_out.add("clamp_weights")
    if not entry.shares_steps:
        left_out |= {"stop", "stop_first_rank"}
    return [callback for callback in CALLBACKS if callback not in left_out]


def _parameter_hooks(entry: Entry, model: str, accumulate: int) -> list[str]:
    if entry.is_sharded:
        return []  # refused
    if entry.is_spread:  # a hook sees a piece, whose rows are not those of the whole
        return ["halve"]
    # Hooks of replicas see a share's gradient, and those of a parameter that stages share the sum
    # over the batches of an update.
    sums_batches = model in OF_SHARED_PARAMETERS and entry.is_pipeline and accumulate > 1
    sees_whole = entry.replicas == 1 and not sums_batches
    return [name for name in PARAMETER_HOOKS if sees_whole or name not in OF_WHOLE_GRADIENTS]


def _precisions(entry: Entry) -> list[str]:
    rough = ["bf16-mixed"] if entry.versions is not None else list(ROUGH_PRECISIONS)
    return ["double"] * 4 + ["64-true", "32-true", *rough]


def _logs(name: str, entry: Entry) -> list[str]:
    left_out: set[str] = set()
    if entry.replicas > 1:
        left_out |= set(OF_WHOLE_BATCHES)
    parts_alone = entry.is_pipeline and not entry.is_spread and entry.replicas == 1
    if not parts_alone or entry.versions is not None:
        left_out |= set(OF_STAGES)
    if entry.is_pipeline or entry.averages_behind_hooks:
        left_out |= set(OF_WHOLE_STEPS)
    if entry.versions is not None:
        left_out |= set(OF_OUTPUTS)
    if name == "1f1b_auto":
        left_out |= set(OF_PIECES)
    return [log for log in LOGS if log not in left_out]


def _keeps(name: str, entry: Entry, callbacks: tuple[str, ...]) -> list[str]:
    left_out: set[str] = set()
    if entry.replicas > 1:  # which have one each, of their own samples
        left_out.add("buffer")
    # One follows weights of this batch, and takes them whole or in the shards that it has, too.
    in_parts = entry.is_spread or (entry.is_sharded and entry.is_pipeline)
    if in_parts or entry.versions is not None or name == "server":
        left_out.add("teacher")
    if entry.is_pipeline and "average" in callbacks:  # a stage averages what it knows of one
        left_out.add("teacher")
    return [kept for kept in KEEPS if kept not in left_out]


def _clips(entry: Entry) -> list[Any]:
    if entry.averages_behind_hooks:  # a worker clips its own gradient
        return [None]
    clips: list[Any] = [None, ("value", 0.01), ("by_hand", 0.01)]
    # Under the others each stage clips by the norm of its own gradients, and says so.
    return clips if entry.versions in ("stash", "vertical_sync") else [*clips, ("norm", 0.05)]


def _some(names: list[str], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    if not names:  # of no names none can be sampled
        return st.just(())
    return st.lists(st.sampled_from(names), max_size=most, unique=True).map(tuple)


def _options(entry: Entry, callbacks: tuple[str, ...]) -> list[str]:
    # A rank that stops alone is heard some batches later, and must be allowed to by then.
    if "stop_first_rank" in callbacks:
        return ["anomaly", "no_inference_mode"]
    # Lightning replaces samplers of its own choice then, and all replicas would read the same.
    left_out = {"overfit"} if entry.replicas > 1 else set()
    return [name for name in TRAINER_OPTIONS if name not in left_out]


def _steppings(name: str, entry: Entry, callbacks: tuple[str, ...]) -> list[str]:
    by_hand = ["manual", "two_manual"] if name in OF_MANUAL_STEPS else []
    if set(OF_AUTOMATIC_STEPS) & set(callbacks):
        by_hand = []
    return ["automatic"] * 4 + ["own_step", *by_hand]


def _returns(
    entry: Entry, model: str, stepping: str, accumulate: int, callbacks: tuple[str, ...]
) -> list[str]:
    # One device gives accumulated batches equal weights.
    weighs = entry.is_pipeline and stepping == "automatic" and accumulate == 1
    weighs = weighs and "accumulate_later" not in callbacks
    of_one_loss = model not in ("scale", "penalty", "two_outputs")
    return ["loss", "dict", *(["weight"] if weighs and of_one_loss else [])]


@st.composite
def cases(draw: st.DrawFn, strategies: tuple[str, ...] | None = None) -> Case:
    """Draws a case; smaller ones first when hypothesis shrinks.

    Args:
        draw: Hypothesis's.
        strategies: Names of the strategies to draw from; None takes all, those on two processes
            twice as often.
    """
    fast = tuple(name for name, entry in STRATEGIES.items() if not entry.is_slow)
    name = draw(st.sampled_from(strategies or (*fast, *STRATEGIES)))
    entry = STRATEGIES[name]
    is_late = entry.versions is not None
    callbacks = draw(_some(_callbacks(name, entry), 3))
    logs = set(draw(_some(_logs(name, entry), 4)))
    scheduler = draw(st.sampled_from((None, *SCHEDULERS)))
    model = draw(st.sampled_from(_models(entry)))
    precision = draw(st.sampled_from(_precisions(entry)))
    is_rough = precision in ROUGH_PRECISIONS or entry.tolerance > 0.0
    if is_rough:
        callbacks = tuple(callback for callback in callbacks if callback not in OF_EXACT_VALUES)
        logs -= set(OF_EXACT_LOGS)
        scheduler = scheduler if scheduler not in ("plateau_step", "plateau_epoch") else None
    if set(OF_LOGGED_LOSS) & set(callbacks) or scheduler == "plateau_step":
        logs.add("loss")
    needs_validation = bool(set(OF_VALIDATION) & set(callbacks)) or scheduler == "plateau_epoch"
    is_exact = precision in ("double", "64-true") and not is_rough
    optimizer = draw(st.sampled_from(_optimizers(entry))) if is_exact else "sgd"
    if model == "sparse":
        optimizer = "adagrad"
    stepping = draw(st.sampled_from(_steppings(name, entry, callbacks)))
    is_manual = stepping in ("manual", "two_manual")
    data = [loader for loader in LOADERS if loader not in OF_ONE_READER or entry.replicas == 1]
    accumulate = 1 if is_late or is_manual else draw(st.sampled_from((1, 1, 2, 3)))
    num_batches = draw(st.integers(2, 5))
    epochs = draw(st.integers(1, 3))
    val_check_interval = draw(st.none() | st.integers(1, num_batches))
    if needs_validation and val_check_interval is not None:
        val_check_interval = draw(st.sampled_from((None, num_batches)))
    check_val_every_n_epoch = 1 if needs_validation else draw(st.sampled_from((1, 1, 2)))
    if val_check_interval is not None and not needs_validation:
        check_val_every_n_epoch = draw(st.sampled_from((None, check_val_every_n_epoch)))
    # One device that resumes under 64-true rounds the weights to 32 bits before it converts itself.
    ends_early = st.none() if precision == "64-true" else st.none() | st.integers(1, 12)
    resume_at = draw(ends_early)
    clip = draw(st.sampled_from(_clips(entry)))
    if is_manual and clip is not None and clip[0] != "by_hand":
        clip = None
    scheduler = scheduler if stepping == "automatic" else None
    options = draw(_some(_options(entry, callbacks), 2))
    if "accumulate_later" in callbacks:
        accumulate = 1
    # All names of a shared parameter are saved, or none.
    saves_part = model not in OF_SHARED_PARAMETERS and draw(
        st.sampled_from((False, False, False, True))
    )
    returns = draw(st.sampled_from(_returns(entry, model, stepping, accumulate, callbacks)))
    if returns == "weight":
        logs = set()
        callbacks = tuple(c for c in callbacks if c not in OF_LOGGED_LOSS)
        scheduler = None if scheduler == "plateau_step" else scheduler
    return Case(
        strategy=name,
        model=model,
        built_late=draw(st.sampled_from((False, False, True))),
        saves_part=saves_part,
        optimizer=optimizer,
        scheduler=scheduler,
        precision=precision,  # type: ignore[arg-type]
        accumulate=accumulate,
        clip=clip,
        callbacks=callbacks,
        logs=tuple(log for log in LOGS if log in logs),
        parameter_hooks=draw(_some(_parameter_hooks(entry, model, accumulate), 1)),
        # What one case has compiled without hooks, torch runs in the next one with hooks.
        layer_hooks=() if model == "compiled" else draw(_some(list(LAYER_HOOKS), 2)),
        keeps=draw(_some(_keeps(name, entry, callbacks), 2)),
        loss_depends_on=draw(
            st.sampled_from((None, None, None, "global_step", "epoch", "batch_idx"))
        ),
        returns=returns,  # type: ignore[arg-type]
        stepping=stepping,  # type: ignore[arg-type]
        data=draw(st.sampled_from(data)),
        # A step that is run ahead reads a batch ahead, too.
        data_module=name not in ("traced", "auto") and draw(st.sampled_from((False, False, True))),
        num_batches=num_batches,
        last_batch=draw(st.sampled_from([n for n in (8, 4, 6, 5, 7) if n % entry.replicas == 0])),
        epochs=epochs,
        val_check_interval=val_check_interval,
        limit_train_batches=draw(st.none() | st.integers(2, num_batches)),
        limit_val_batches=draw(st.integers(1 if needs_validation else 0, 2)),
        # A rank that wants to stop logs the batch at hand, at whatever interval.
        log_every_n_steps=draw(st.integers(1, 1 if "stop_first_rank" in callbacks else 3)),
        sanity_steps=draw(st.sampled_from((0, 0, 1, 2))),
        val_loaders=1 if needs_validation else draw(st.sampled_from((1, 1, 2))),
        val_outputs=draw(st.booleans()),
        options=options,
        fits=draw(st.sampled_from(("once", "once", "once", "again", "anew"))),  # type: ignore[arg-type]
        validates_first=draw(st.sampled_from((False, False, True))),
        check_val_every_n_epoch=check_val_every_n_epoch,
        reload_every_n_epochs=draw(st.sampled_from((0, 0, 0, 1))),
        max_steps=draw(st.none() | st.integers(1, 12)),
        resume_at=resume_at,
        goes_on=resume_at is not None and draw(st.booleans()),
        begun_by_one_device=resume_at is not None and draw(st.booleans()),
        evaluates=draw(st.booleans()),
        # Of replicas, each rank's finder sees its own losses.
        lr_find=resume_at is None
        and not saves_part  # what the finder does not restore stays as its last batches left it
        and stepping == "automatic"
        and "dev_run" not in options
        and entry.replicas == 1
        and draw(st.sampled_from((False, False, False, True))),
        # A step that is run ahead, to be traced or timed, calls hooks of the first batch ahead.
        hooks=name not in ("traced", "auto") and draw(st.booleans()),
    )
