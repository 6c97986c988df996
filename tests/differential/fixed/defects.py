"""A case for each kind of defect that there once was."""

from __future__ import annotations

from tests.differential.case import Case
from tests.differential.fixed.entry import Fixed

DEFECTS: dict[str, Fixed] = {
    # --- checkpoints: names that differ by rank, optimizers with eager state ---------------------
    "checkpoint names differ by rank, stages": Fixed(
        Case("1f1b", callbacks=("own_names",), epochs=2)
    ),
    "checkpoint names differ by rank, shards": Fixed(Case("fsdp", callbacks=("own_names",))),
    "Adagrad saves, stages": Fixed(Case("1f1b", optimizer="adagrad", callbacks=("every_steps",))),
    "Adagrad resumes, asynchronous": Fixed(
        Case("pipedream", optimizer="adagrad", epochs=2, resume_at=4)
    ),
    "an error on all ranks, stages": Fixed(Case("1f1b", callbacks=("on_exception", "raises"))),
    "an error on all ranks, replicas": Fixed(Case("ddp", callbacks=("on_exception", "raises"))),
    # --- what steps and hooks keep in the module -------------------------------------------------
    "a teacher, validated while gradients accumulate": Fixed(
        Case("gpipe", accumulate=2, keeps=("teacher", "samples"), val_check_interval=1)
    ),
    "a teacher whose biases keep their sums": Fixed(
        Case(
            "interleaved",
            model="scale",
            optimizer="adadelta",
            clip=("value", 0.01),
            callbacks=("every_steps",),
            keeps=("teacher",),
        )
    ),
    "a teacher beside replicas of stages": Fixed(
        Case("replicas_of_stages", keeps=("teacher", "losses"), epochs=2)
    ),
    "a teacher of shared weights": Fixed(Case("zb_h1", model="tied", keeps=("teacher", "buffer"))),
    "a teacher that is never run, accumulated in half precision, shards": Fixed(
        Case("fsdp", precision="bf16-mixed", accumulate=2, keeps=("teacher",), limit_val_batches=0)
    ),
    "norms of gradients, shards": Fixed(Case("fsdp", logs=("gradients",))),
    # --- what optimizers keep in their groups ----------------------------------------------------
    "counters in groups, pipedream": Fixed(
        Case("pipedream", optimizer="schedule_free", scheduler="exponential_step", epochs=2)
    ),
    "counters in groups, 2bw": Fixed(
        Case("2bw", optimizer="schedule_free", callbacks=("rate_by_hand",), epochs=2)
    ),
    "counters in groups are tensors, servers": Fixed(
        Case("server", optimizer="counting_tensor", callbacks=("every_steps",))
    ),
    "counters in groups are tensors": Fixed(
        Case("pipedream", optimizer="counting_tensor", scheduler="exponential_step")
    ),
    "one estimate for all parameters": Fixed(
        Case("1f1b", optimizer="one_estimate", callbacks=("every_steps",)),
        refusal="gradients of others",
    ),
    "one estimate for all parameters, pipedream": Fixed(
        Case("pipedream", optimizer="one_estimate"), refusal="gradients of others"
    ),
    # --- parameters that the step uses, and hooks of parameters ----------------------------------
    "the step scales logits, pipedream": Fixed(Case("pipedream", model="scale")),
    "the step scales logits, 2bw": Fixed(Case("2bw", model="scale", optimizer="adamw")),
    "the step penalizes the head, vertical sync": Fixed(Case("vertical_sync", model="penalty")),
    "hooks of gradients, shards": Fixed(
        Case("fsdp", parameter_hooks=("halve",)), refusal="on_before_optimizer_step"
    ),
    "hooks of gradients, replicas of stages": Fixed(
        Case("replicas_of_stages", parameter_hooks=("halve",))
    ),
    "hooks of gradients, sharded layers": Fixed(Case("tp", parameter_hooks=("halve",))),
    "hooks of accumulated gradients, replicas": Fixed(Case("ddp", parameter_hooks=("mask",))),
    "hooks of gradients, pipedream": Fixed(Case("pipedream", parameter_hooks=("halve",))),
    "hooks of accumulated gradients, 2bw": Fixed(
        Case("2bw", model="norms", parameter_hooks=("mask",), clip=("norm", 0.05))
    ),
    "a traced module's step uses a parameter, with hooks": Fixed(
        Case("traced", model="penalty", parameter_hooks=("halve",), callbacks=("weights",))
    ),
    "hooks of a whole gradient, stages": Fixed(
        Case("zb_h1", parameter_hooks=("clamp",), accumulate=2)
    ),
    "hooks of a whole gradient that stages share": Fixed(
        Case("1f1b", model="tied", parameter_hooks=("clamp",), clip=("norm", 0.05))
    ),
    "hooks of a whole gradient that stages of a rank share": Fixed(
        Case("zbv", model="tied", parameter_hooks=("clamp",), accumulate=2)
    ),
    "hooks of a whole gradient that stages share, 2bw": Fixed(
        Case("2bw", model="tied", parameter_hooks=("clamp",), clip=("norm", 0.05))
    ),
    "hooks of a weighted mean's gradient": Fixed(
        Case("zb_h1", parameter_hooks=("clamp",), returns="weight", last_batch=5, epochs=2)
    ),
    "hooks of a weighted mean's gradient, pipedream": Fixed(
        Case("pipedream", parameter_hooks=("clamp",), returns="weight", last_batch=5, epochs=2)
    ),
    # --- numbers that a module draws and keeps ---------------------------------------------------
    "replicas draw other numbers in configure_model": Fixed(
        Case("ddp", model="extra_state", built_late=True)
    ),
    # --- calls of the model in hooks -------------------------------------------------------------
    "a hook calls a model that has hooks": Fixed(
        Case("1f1b", callbacks=("samples",), layer_hooks=("model", "input"))
    ),
    # --- parameters that some steps do not use, sparse gradients ---------------------------------
    "experts, replicas": Fixed(Case("ddp", model="experts", optimizer="adamw", epochs=2)),
    "experts, shards": Fixed(Case("fsdp", model="experts", optimizer="adamw", epochs=2)),
    "experts, sharded layers": Fixed(Case("tp", model="experts", optimizer="adamw", epochs=2)),
    "experts, pipedream": Fixed(Case("pipedream", model="experts", optimizer="adamw", epochs=2)),
    "experts, sharded stages in half precision": Fixed(
        Case("spread_stages", model="experts", precision="half", num_batches=2)
    ),
    "experts, a plan": Fixed(Case("auto", model="experts", accumulate=3)),
    "experts, accumulated in half precision, shards": Fixed(
        Case("fsdp", model="experts", precision="half", accumulate=3)
    ),
    "experts, half precision, shards of stages": Fixed(
        Case("mesh", model="experts", precision="half")
    ),
    "sparse gradients, 2bw": Fixed(Case("2bw", model="sparse", optimizer="adagrad")),
    "sparse gradients, replicas of stages": Fixed(
        Case("replicas_of_stages", model="sparse", optimizer="adagrad"), refusal="sparse=False"
    ),
    "sparse gradients, a plan": Fixed(
        Case("auto", model="sparse", optimizer="adagrad"), refusal="sparse=False"
    ),
    # --- the trainer's options, other steps, other fits ------------------------------------------
    "anomaly detection, sharded layers": Fixed(
        Case("tp", options=("anomaly",)), refusal="detect_anomaly=True with tp_size=2"
    ),
    "the step steps two optimizers, shards": Fixed(
        Case("fsdp", stepping="two_manual", clip=("by_hand", 0.01), epochs=2)
    ),
    "a warm-up by hand, a second fit, asynchronous": Fixed(
        Case("2bw", stepping="own_step", fits="again", callbacks=("every_steps",), hooks=True)
    ),
    "a second Trainer, two validation loaders": Fixed(
        Case("1f1b", fits="anew", val_loaders=2, validates_first=True, options=("min_epochs",))
    ),
    # --- what users put on parameters ------------------------------------------------------------
    "tags of parameters, built late, shards, a second Trainer": Fixed(
        Case("fsdp", built_late=True, optimizer="two_groups", fits="anew")
    ),
    "tags of parameters, sharded layers, a second fit": Fixed(
        Case("tp", optimizer="two_groups", fits="again")
    ),
    "tags of parameters, sharded stages": Fixed(
        Case("mesh", optimizer="two_groups", resume_at=2, goes_on=True)
    ),
    "tags of parameters, replicas of stages": Fixed(
        Case("replicas_of_stages", built_late=True, optimizer="two_groups")
    ),
    "hooks of parameters, built late, replicas": Fixed(
        Case("replicas", built_late=True, parameter_hooks=("mask",))
    ),
    # --- the learning rate finder ----------------------------------------------------------------
    "rate finder, pipedream": Fixed(Case("pipedream", lr_find=True)),
    "rate finder, 2bw": Fixed(Case("2bw", lr_find=True, scheduler="exponential_step")),
    "rate finder, stages": Fixed(Case("gpipe", lr_find=True, callbacks=("rates",))),
    # --- logging ---------------------------------------------------------------------------------
    "reductions are over batches": Fixed(
        Case("1f1b_auto", logs=("sum", "max", "min", "count"), last_batch=4, epochs=2)
    ),
    "a reduction of the user's own": Fixed(Case("gpipe", logs=("callable", "loss"))),
    "batch sizes given, a smaller last batch": Fixed(
        Case("1f1b_auto", logs=("batch_size", "fixed_batch_size"), last_batch=3)
    ),
    "a batch size of one given, a smaller last batch": Fixed(
        Case("1f1b_auto", logs=("batch_size", "size_one"), batch_size=16, last_batch=3)
    ),
    "outputs of the first batches": Fixed(Case("pipedream", returns="dict", limit_val_batches=0)),
    "a callback that stops at nan": Fixed(Case("vertical_sync", callbacks=("stop_at_nan",))),
    "values of batches in flight at a drain": Fixed(
        Case("pipedream", logs=("loss", "step_only"), num_batches=5, val_check_interval=2)
    ),
    "a plateau by steps": Fixed(
        Case("pipedream", scheduler="plateau_step", logs=("loss",), epochs=2)
    ),
    "hooks sum over stages": Fixed(Case("1f1b", logs=("norms", "batch_end"), accumulate=2)),
    "hooks log under names of parameters": Fixed(
        Case("gpipe", logs=("by_parameter", "norms"), model="norms")
    ),
    "logged before the model runs": Fixed(Case("zb_h1", logs=("before", "loss", "dict"))),
    "a list with a tensor for each sample": Fixed(Case("gpipe", data="list", logs=("loss",))),
    "a metric under 64 bits, a micro-batch for each sample": Fixed(
        Case("1f1b_auto", precision="64-true", logs=("metric",), last_batch=7)
    ),
    "the last batch of an epoch stops, asynchronous": Fixed(
        Case(
            "pipedream",
            callbacks=("stop",),
            logs=("loss",),
            num_batches=3,
            epochs=2,
            log_every_n_steps=2,
        )
    ),
    # --- behind a fit, and before it -------------------------------------------------------------
    "predicts a list with a tensor for each sample": Fixed(
        Case("gpipe", data="list", evaluates=True)
    ),
    "tests the average of a shared parameter": Fixed(
        Case("fsdp", model="tied", callbacks=("average", "best"), evaluates=True)
    ),
    "resumes an average of a shared parameter": Fixed(
        Case("1f1b", model="tied", callbacks=("average", "best"), epochs=3, resume_at=6)
    ),
    "resumes what one device has begun, stages": Fixed(
        Case(
            "1f1b",
            optimizer="adamw",
            callbacks=("best", "average"),
            epochs=3,
            resume_at=6,
            begun_by_one_device=True,
            sanity_steps=1,
            evaluates=True,
        )
    ),
    # --- stopping, reading -----------------------------------------------------------------------
    "the first rank alone stops": Fixed(
        Case("1f1b", callbacks=("stop_first_rank",), num_batches=5, epochs=2)
    ),
    "the first rank alone stops, asynchronous": Fixed(
        Case("pipedream", callbacks=("stop_first_rank",), logs=("loss",), num_batches=7)
    ),
    "the first rank alone stops, ahead of a validation": Fixed(
        Case(
            "pipedream",
            callbacks=("stop_first_rank",),
            logs=("loss",),
            num_batches=7,
            val_check_interval=4,
        )
    ),
    "drawn at random before": Fixed(Case("1f1b", data="drawn", logs=("loss",))),
    "drawn at random while read": Fixed(
        Case("zb_h1", data="augmented", callbacks=("draws",), epochs=2)
    ),
    "drawn at random while read, pipedream": Fixed(
        Case("pipedream", data="augmented", callbacks=("draws",))
    ),
    "drawn at random while read, sharded layers": Fixed(Case("tp", data="augmented")),
    "layers that run again while a planner measures them": Fixed(
        Case("auto", model="recomputed", precision="half", data="two")
    ),
}
