"""torch.compile of layers and of whole stages under each schedule, zero bubbles among them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.schedules.registry import SCHEDULE_NAMES
from lightning_dist.engine.splitting.cut import layers_of
from tests.gpu.pieces.in_process import (
    batches,
    make_model,
    make_optimizer,
    shapes,
    step_of,
    update,
)
from tests.gpu.ranks import attempt, exact_products, within
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.processes.threads import run_ranks

TOLERANCE = 1e-9


def compiled(setting: Setting) -> Iterator[Row]:
    """Trains compiled layers, and compiled stages, beside the same ones uncompiled."""
    exact_products()
    for name in SCHEDULE_NAMES:
        eager = _train_compiled(setting, name, "not")
        for how in ("layers", "stages"):
            what = f"compiled {how}, {name}"
            yield attempt(what, partial(_compiled_row, what, setting, name, how, eager))


def _compiled_row(
    what: str, setting: Setting, schedule: str, how: str, eager: dict[str, Tensor]
) -> Row:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    found = _train_compiled(setting, schedule, how)
    difference = max(float((found[name] - eager[name]).abs().max()) for name in eager)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    row = within(what, difference, TOLERANCE, f"{difference:.1e}, {graphs} graphs")
    return row if graphs else Row(what, "nothing was compiled", "some graphs", Verdict.FAILS)


def _train_compiled(setting: Setting, schedule: str, how: str) -> dict[str, Tensor]:
    models: list[nn.Sequential] = []
    ranks = shapes(schedule)

    def make() -> nn.Sequential:
        net = make_model(setting)
        if how == "layers":
            for layer in net:
                layer.compile(backend=setting.compiler)
        models.append(net)
        return net

    def layers(stage: int) -> nn.Module:
        rank = ranks[0].rank_of_stage[stage]
        whole = layers_of(models[rank], ranks[0].layers_per_stage, stage)
        whole.compile(backend=setting.compiler)
        return whole

    def train(net: nn.Sequential, pipeline: Pipeline) -> dict[str, Tensor]:
        optimizer = make_optimizer(net)
        for batch in data:
            pipeline.train_batch(batch, step_of(net))
            if pipeline.has_gradients:
                update(pipeline, optimizer)
        for _ in pipeline.drain():
            update(pipeline, optimizer)
        return {name: p.detach().clone() for name, p in net.named_parameters()}

    data = batches(setting)
    options = {"layers": layers} if how == "stages" else {}
    # The default of 30 s is for what is not compiled.
    parts = run_ranks(make, ranks, train, device=setting.torch_device, seconds=120, **options)
    return {name: value for part in parts for name, value in part.items()}
