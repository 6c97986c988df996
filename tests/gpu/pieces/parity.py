"""Every strategy on one and two ranks beside one device, in float64 and float32.

On two ranks the process group is gloo first, over which tensors are staged through host memory, and
then NCCL, if that takes two ranks on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from tests.gpu.pieces.two_ranks import exchange
from tests.gpu.ranks import NCCL_ON_ONE_GPU, Ranks, open_ranks, trainer_of
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.networks.models import make_data, make_loader, make_module, state_of
from tests.helpers.processes.workers import CaseFailedError
from tests.integration.conformance.common import GLOBAL_BATCH, TOLERANCE, Synced
from tests.integration.conformance.strategies import PLAN
from tests.integration.pipeline.common import EPOCHS
from tests.integration.pipeline.parity import test_one_batch_late, test_oracle

Make = Callable[..., Any]
"""Makes a strategy; takes the backend and other options that all strategies have."""

TRAIN_SAMPLES = 36  # ten batches in two epochs, the last of each half as large
TOLERANCES = {torch.float64: TOLERANCE, torch.float32: 1e-5}
SYNCHRONOUS = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zbv")

ON_ONE: dict[str, Make] = {
    **{f"pipeline {name}": partial(PipelineStrategy, schedule=name) for name in SYNCHRONOUS},
    "pipeline pipedream": partial(PipelineStrategy, schedule="pipedream"),
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "tensor parallel": partial(TensorParallelStrategy, plan=PLAN),
    "mesh": MeshStrategy,
}


def _mesh_of_stages(transport: str, **options: Any) -> MeshStrategy:
    pipeline = PipelineConfig(num_microbatches=2, transport=transport)
    return MeshStrategy(pp=2, pipeline=pipeline, **options)


STAGED: dict[str, Make] = {
    **{
        f"pipeline {name}": partial(PipelineStrategy, schedule=name, num_microbatches=4)
        for name in SYNCHRONOUS
    },
    "mesh, 2 stages": _mesh_of_stages,
}
"""Strategies whose ranks send each other tensors; they take the transport, too."""
ON_TWO: dict[str, Make] = {
    **STAGED,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "parameter server": ParameterServerStrategy,
    "tensor parallel": partial(TensorParallelStrategy, plan=PLAN),
    "mesh, 2 tensor-parallel ranks": partial(MeshStrategy, tp=2, tensor=TensorConfig(plan=PLAN)),
}
ORDINARY = partial(make_module, Synced)
REPLICAS = {"ddp": 2, "fsdp": 2, "parameter server": 2}
REFUSED_OVER_GLOO = ("tensor parallel", "mesh, 2 tensor-parallel ranks")
"""On a GPU, where torch's all-gather of DTensors crashes the process (pytorch#152645)."""


def one_rank(setting: Setting) -> Iterator[Row]:
    with open_ranks(setting) as ranks:
        expected = ranks.run(1, fit_both, "one device", 1, {})[0]
        for name in ON_ONE:
            yield compare(ranks, name, 1, {}, expected, {})


def two_ranks(setting: Setting) -> Iterator[Row]:
    with open_ranks(setting) as ranks:
        expected = ranks.run(1, fit_both, "one device", 1, {})[0]
        yield from _on_two(ranks, "gloo", expected, {})
    if not setting.is_gpu:
        return
    with open_ranks(setting) as ranks:
        try:
            ranks.run(2, exchange, environment=NCCL_ON_ONE_GPU, timeout=60)
        except CaseFailedError:
            found = "NCCL does not take two ranks on this device; see two_ranks"
            yield Row("over nccl", found, "", Verdict.LEFT_OUT)
            return
        yield from _on_two(ranks, "nccl", expected, NCCL_ON_ONE_GPU)


Fitted = dict[torch.dtype, dict[str, Tensor]]
"""The parameters that a rank holds after a training in each precision."""


def _on_two(
    ranks: Ranks, backend: str, expected: Fitted, environment: dict[str, str]
) -> Iterator[Row]:
    options = {"process_group_backend": backend}
    for name in ON_TWO:
        if ranks.setting.is_gpu and backend == "gloo" and name in REFUSED_OVER_GLOO:
            yield refused(ranks, name, options)
        else:
            yield compare(ranks, name, 2, options, expected, environment)
    oracles = {
        "pipedream": test_oracle.oracle(2)[0],
        "pipedream_2bw": test_one_batch_late.oracle()[0],
    }
    for schedule, of_oracle in oracles.items():
        what = f"pipeline {schedule}, 2 ranks over {backend}, beside its oracle"
        try:
            found = ranks.run(2, fit_late, schedule, options, environment=environment)
            yield _row(what, {torch.float64: largest_difference(found, of_oracle)})
        except CaseFailedError as error:
            yield failed(what, error)


def compare(
    ranks: Ranks,
    name: str,
    count: int,
    options: dict[str, Any],
    expected: Fitted,
    environment: dict[str, str],
) -> Row:
    backend = f" over {options['process_group_backend']}" if options else ""
    what = f"{name}, {count} rank{'s' * (count > 1)}{backend}"
    try:
        parts = ranks.run(count, fit_both, name, count, options, environment=environment)
    except CaseFailedError as error:
        return failed(what, error)
    return _row(
        what,
        {t: largest_difference([part[t] for part in parts], expected[t]) for t in TOLERANCES},
    )


def refused(ranks: Ranks, name: str, options: dict[str, Any]) -> Row:
    what, wanted = f"{name}, 2 ranks over gloo", "refused, with pytorch#152645"
    try:
        ranks.run(2, fit_both, name, 2, options)
    except CaseFailedError as error:
        row = failed(what, error)
        holds = row.found.startswith("ValueError: ") and "pytorch#152645" in row.found
        return Row(what, row.found, wanted, Verdict.HOLDS if holds else Verdict.FAILS)
    return Row(what, "trained", wanted, Verdict.FAILS)


def failed(what: str, error: CaseFailedError) -> Row:
    return Row(what, str(error).strip().splitlines()[-1], "", Verdict.FAILS)


def _row(what: str, differences: dict[torch.dtype, float]) -> Row:
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in differences}
    found = ", ".join(f"{names[t]} {difference:.1e}" for t, difference in differences.items())
    wanted = ", ".join(f"{names[t]} < {TOLERANCES[t]:g}" for t in differences)
    holds = all(difference < TOLERANCES[t] for t, difference in differences.items())
    return Row(what, found, wanted, Verdict.HOLDS if holds else Verdict.FAILS)


def largest_difference(parts: list[dict[str, Tensor]], expected: dict[str, Tensor]) -> float:
    """Compares what all ranks hold with the whole model; nan if one value is."""
    found = {name: value for part in parts for name, value in part.items()}
    assert found.keys() == expected.keys()
    each = [(found[n].double() - expected[n].double()).abs().max() for n in expected]
    return float(torch.stack(each).max())


# --- on a rank -----------------------------------------------------------------------------------


def fit_both(setting: Setting, name: str, count: int, options: dict[str, Any]) -> Fitted:
    """Trains in both precisions; returns this rank's parameters, on the CPU."""
    return {dtype: fit(setting, name, count, options, dtype) for dtype in TOLERANCES}


def fit(
    setting: Setting,
    name: str,
    count: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    make: Callable[[], Any] = ORDINARY,
    **trainer_options: Any,
) -> dict[str, Tensor]:
    """Trains a module; returns this rank's parameters, on the CPU."""
    strategy: Any = "auto"
    if name != "one device":
        staged = _transport(setting, options) if count > 1 and name in STAGED else {}
        strategy = (ON_ONE if count == 1 else ON_TWO)[name](**options, **staged)
    trainer = trainer_of(setting, strategy, count, max_epochs=2, **trainer_options)
    module = make().to(dtype)
    trainer.fit(module, loader_of(trainer, name, count, dtype))
    return {n: value.cpu() for n, value in state_of(module).items()}


def _transport(setting: Setting, options: dict[str, Any]) -> dict[str, str]:
    """Returns the transport; gloo sends no tensors of a GPU point to point."""
    is_staged = setting.is_gpu and options["process_group_backend"] == "gloo"
    return {"transport": "gloo" if is_staged else setting.transport}


def loader_of(trainer: Any, name: str, count: int, dtype: torch.dtype) -> DataLoader[Any]:
    x, y = make_data(TRAIN_SAMPLES).tensors
    data = TensorDataset(x.to(dtype), y)
    replicas = REPLICAS.get(name, 1) if count > 1 else 1
    if replicas == 1:
        return DataLoader(data, batch_size=GLOBAL_BATCH)
    place = trainer.strategy.distributed_sampler_kwargs
    assert place["num_replicas"] == replicas
    sampler = DistributedSampler(data, shuffle=False, **place)
    return DataLoader(data, batch_size=GLOBAL_BATCH // replicas, sampler=sampler)


def fit_late(setting: Setting, schedule: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Trains as the oracles of the asynchronous schedules do, which drain behind each epoch."""
    options = {**options, **_transport(setting, options)}
    strategy = PipelineStrategy(schedule=schedule, partition="uniform", **options)
    trainer = trainer_of(setting, strategy, 2, max_epochs=EPOCHS, limit_val_batches=1)
    module = make_module()
    trainer.fit(module, make_loader(), make_loader())
    return {n: value.cpu() for n, value in state_of(module).items()}
