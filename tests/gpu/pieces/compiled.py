"""torch.compile of layers and of whole stages under each schedule, zero bubbles among them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_dist import PipelineStrategy
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from tests.gpu.pieces.parity import failed, largest_difference
from tests.gpu.ranks import Ranks, open_ranks, trainer_of, within
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.networks.models import make_loader, make_module, state_of
from tests.helpers.processes.workers import CaseFailedError

TOLERANCE = 1e-9
ON_A_CPU = ("1f1b", "zb_h1", "pipedream")
ASYNCHRONOUS = ("pipedream", "pipedream_2bw")


def compiled(setting: Setting) -> Iterator[Row]:
    """Trains compiled layers, and compiled stages, beside the same ones uncompiled."""
    with open_ranks(setting) as ranks:
        others = [name for name in SCHEDULE_NAMES if name not in ASYNCHRONOUS]
        for name in (*ASYNCHRONOUS, *others) if setting.is_gpu else ON_A_CPU:
            eager = ranks.run(2, fit_compiled, name, "not")
            whole = {key: value for state, _ in eager for key, value in state.items()}
            for how in ("layers", "stages"):
                yield _compare(ranks, f"compiled {how}, {name}", name, how, whole)


def _compare(ranks: Ranks, what: str, schedule: str, how: str, eager: dict[str, Tensor]) -> Row:
    try:
        parts = ranks.run(2, fit_compiled, schedule, how)
    except CaseFailedError as error:
        return failed(what, error)
    difference = largest_difference([state for state, _ in parts], eager)
    graphs = [number for _, number in parts]
    row = within(what, difference, TOLERANCE, f"{difference:.1e}, {sum(graphs)} graphs")
    return row if all(graphs) else Row(what, "nothing was compiled", "some graphs", Verdict.FAILS)


def fit_compiled(setting: Setting, schedule: str, how: str) -> tuple[dict[str, Tensor], int]:
    """Trains; returns this rank's parameters, on the CPU, and how many graphs were compiled."""
    torch.compiler.reset()
    counters = torch._dynamo.utils.counters  # what tests of torch itself read
    counters.clear()
    module = make_module()
    if how == "layers":
        for layer in module.model:
            layer.compile(backend=setting.compiler)
    elif how == "stages":
        module.model.compile(backend=setting.compiler)
    count = {} if schedule in ASYNCHRONOUS else {"num_microbatches": 4}
    strategy = PipelineStrategy(
        schedule=schedule,
        partition="uniform",
        process_group_backend="gloo",
        transport="gloo",
        **count,
    )
    trainer = trainer_of(setting, strategy, 2, limit_val_batches=0, limit_train_batches=3)
    trainer.fit(module, make_loader())
    state = {name: value.cpu() for name, value in state_of(module).items()}
    return state, counters["stats"]["unique_graphs"]
