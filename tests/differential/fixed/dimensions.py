"""Cases in which each dimension occurs."""

from __future__ import annotations

from tests.differential.case import Case
from tests.differential.fixed.entry import Fixed

DIMENSIONS: dict[str, Fixed] = {
    # --- what steps keep in the module, hooks of layers, batches of several loaders --------------
    "outputs of validation are kept, stages": Fixed(
        Case("1f1b", val_outputs=True, val_loaders=2, sanity_steps=1, epochs=2, hooks=True)
    ),
    "outputs of validation are kept, the rate finder, pipedream": Fixed(
        Case("pipedream", model="two_outputs", val_outputs=True, lr_find=True)
    ),
    "outputs of validation are kept, sharded stages": Fixed(
        Case("mesh", val_outputs=True, evaluates=True)
    ),
    "hooks of layers, stages": Fixed(
        Case("zbv", model="masked", layer_hooks=("input", "gradient", "model"))
    ),
    "hooks of layers, pipedream": Fixed(
        Case("pipedream", layer_hooks=("inside", "output_gradient"), loss_depends_on="global_step")
    ),
    "hooks of layers, sharded layers": Fixed(Case("tp", layer_hooks=("inside", "named", "output"))),
    "hooks of layers, shards": Fixed(
        Case("fsdp", layer_hooks=("inside", "gradient"), loss_depends_on="epoch", epochs=2)
    ),
    "texts of other lengths in each batch, 2bw": Fixed(
        Case("2bw", model="tokens", data="lengths", val_outputs=True, num_batches=5)
    ),
    "arrays beside tensors, stages": Fixed(
        Case("zbv", data="arrays", evaluates=True, num_batches=5, last_batch=6)
    ),
    "arrays beside tensors, replicas": Fixed(Case("replicas_of_stages", data="arrays", epochs=2)),
    "batches of two loaders, from a data module": Fixed(
        Case("1f1b", data="two", data_module=True, resume_at=2, epochs=2, hooks=True)
    ),
    "batches of two loaders, replicas": Fixed(
        Case("ddp", data="two_shortest", data_module=True, fits="again")
    ),
    # --- names in checkpoints that are not those of parameters -----------------------------------
    "renamed in checkpoints, traced stages": Fixed(Case("traced", model="renamed", resume_at=2)),
    "renamed in checkpoints, shards": Fixed(
        Case("fsdp", model="renamed", resume_at=2, begun_by_one_device=True)
    ),
    "renamed in checkpoints, sharded stages": Fixed(
        Case("spread_stages", model="renamed", callbacks=("every_steps",), resume_at=2)
    ),
    "a number beside weights in checkpoints": Fixed(
        Case("zbv", model="extra_state", resume_at=2, goes_on=True)
    ),
    # --- many at once ----------------------------------------------------------------------------
    "stages, all hooks": Fixed(
        Case(
            "interleaved",
            model="norms",
            optimizer="two_groups",
            scheduler="one_cycle",
            accumulate=2,
            clip=("norm", 0.05),
            callbacks=("best", "rates"),
            logs=("loss", "metric", "integer"),
            num_batches=5,
            last_batch=6,
            epochs=2,
            val_check_interval=3,
            limit_val_batches=2,
            log_every_n_steps=2,
            hooks=True,
        )
    ),
    "stages that share a parameter": Fixed(
        Case("zbv", model="tied", optimizer="adamw", callbacks=("weights", "timer"), data="dicts")
    ),
    "stages, frozen layers": Fixed(
        Case("gpipe_whole", model="frozen", optimizer="rmsprop", callbacks=("unfreeze",), epochs=2)
    ),
    "unfrozen shards, half precision": Fixed(
        Case("fsdp", model="norms", precision="half", callbacks=("unfreeze",), epochs=2)
    ),
    "unfrozen while stages fill, pipedream": Fixed(
        Case(
            "pipedream",
            callbacks=("unfreeze", "every_steps"),
            num_batches=5,
            epochs=2,
            limit_val_batches=0,
        )
    ),
    "unfrozen while stages fill, vertical sync": Fixed(
        Case(
            "vertical_sync",
            callbacks=("unfreeze", "every_steps"),
            num_batches=5,
            epochs=2,
            limit_val_batches=0,
        )
    ),
    "a block that three stages share, frozen at first": Fixed(
        Case("interleaved", model="repeated", callbacks=("unfreeze",), epochs=2)
    ),
    "a block that stages share, frozen at first, 2bw": Fixed(
        Case("2bw", model="repeated", callbacks=("unfreeze",), epochs=2)
    ),
    "a norm in a block that sharded stages share, in half precision": Fixed(
        Case("mesh", model="repeated", precision="half")
    ),
    "stages, running statistics": Fixed(
        Case("gpipe_whole", model="batch_norms", precision="64-true", callbacks=("linked_last",))
    ),
    "stages, two outputs": Fixed(
        Case("1f1b", model="two_outputs", data="stream", callbacks=("average", "count"), epochs=2)
    ),
    "stages resume in the middle of an epoch": Fixed(
        Case(
            "1f1b",
            optimizer="adamw",
            scheduler="step_epoch",
            callbacks=("best", "count"),
            data="shuffled",
            epochs=3,
            resume_at=6,
        )
    ),
    "pipedream, callbacks": Fixed(
        Case(
            "pipedream",
            model="norms",
            optimizer="adamw",
            scheduler="plateau_epoch",
            callbacks=("early", "best", "rates_by_epoch"),
            data="shuffled",
            last_batch=5,
            epochs=3,
            limit_val_batches=2,
        )
    ),
    "2bw, a shared parameter": Fixed(
        Case("2bw", model="tied", callbacks=("train_best",), logs=("loss",), epochs=2)
    ),
    "replicas": Fixed(
        Case(
            "ddp",
            model="norms",
            optimizer="nadam",
            scheduler="plateau_epoch",
            callbacks=("best", "early_train", "ema"),
            logs=("loss", "metric", "batch_size"),
            data="shuffled",
            last_batch=6,
            epochs=3,
            hooks=True,
        )
    ),
    "replicas, a backbone that is frozen first": Fixed(
        Case("ddp", callbacks=("finetune", "rates"), accumulate=2, epochs=2)
    ),
    "replicas stop when their first one does": Fixed(
        Case("ddp", callbacks=("stop_first_rank",), num_batches=5, epochs=2)
    ),
    "a plan is measured in half precision": Fixed(Case("auto", precision="half")),
    "a plan for a list with a tensor for each sample": Fixed(Case("auto", data="list")),
    "a traced module's batch lists a tensor for each sample": Fixed(Case("traced", data="list")),
    "workers push as they like": Fixed(
        Case("server_async", callbacks=("every_steps", "rates"), logs=("loss",), hooks=True)
    ),
    "workers without locks": Fixed(
        Case("hogwild", callbacks=("linked_last", "rates"), logs=("loss",), epochs=2, resume_at=5)
    ),
    "shards": Fixed(
        Case(
            "fsdp",
            model="norms",
            optimizer="amsgrad",
            scheduler="one_cycle",
            clip=("value", 0.01),
            callbacks=("best", "average", "rates"),
            logs=("loss", "metric"),
            limit_train_batches=3,
            epochs=2,
            hooks=True,
        )
    ),
    "sharded layers": Fixed(
        Case(
            "tp",
            model="tied",
            optimizer="asgd",
            accumulate=2,
            clip=("norm", 0.05),
            callbacks=("best", "accumulate_later"),
            logs=("loss", "rate"),
            data="dicts",
            epochs=2,
        )
    ),
    "a mean over replicas is of one device's dtype": Fixed(
        Case("ddp", precision="32-true", callbacks=("best",), num_batches=2)
    ),
    "32 bits": Fixed(Case("gpipe", model="norms", precision="32-true", logs=("loss",), epochs=2)),
}
