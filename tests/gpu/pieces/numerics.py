"""Half precision, optimizers of the device, synchronised BatchNorm and deterministic mode."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_dist import DDPStrategy, FSDPStrategy, PipelineStrategy
from tests.gpu.pieces.parity import (
    REFUSED_OVER_GLOO,
    TOLERANCES,
    failed,
    fit,
    largest_difference,
)
from tests.gpu.ranks import NCCL_ON_ONE_GPU, Ranks, open_ranks, trainer_of, within
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting
from tests.helpers.half_reference import Scale
from tests.helpers.networks.models import make_module
from tests.helpers.processes.workers import CaseFailedError
from tests.integration.callbacks import half_common as half
from tests.integration.conformance.common import Synced
from tests.integration.ddp import test_synced_batch_norm as normed

GLOO = {"process_group_backend": "gloo"}
HALF_TOLERANCE = 1e-3
"""Of fp32 masters, for kernels that add up in another order."""


def measured(ranks: Ranks, what: str, count: int, case: Callable[..., Row], *given: Any) -> Row:
    """Returns the row of a case, which is the same on all ranks, or that of its failure."""
    try:
        return ranks.run(count, case, what, *given)[0]
    except CaseFailedError as error:
        return failed(what, error)


# --- half precision ------------------------------------------------------------------------------

PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"compute": "bf16"}, {}),
    "fp16": ({"compute": "fp16", "initial_scale": 2.0**10}, {"dtype": torch.float16}),
}
HALVES: dict[str, tuple[int, Callable[..., Any], dict[str, Any]]] = {
    "one device": (1, lambda: "auto", {}),
    "ddp": (1, DDPStrategy, {}),
    "fsdp": (1, FSDPStrategy, {}),
    "pipeline 1f1b": (1, partial(PipelineStrategy, num_microbatches=4), {"num_microbatches": 4}),
    "pipeline zbv": (
        1,
        partial(PipelineStrategy, schedule="zbv", num_microbatches=4),
        {"num_microbatches": 4},
    ),
    "ddp, 2 ranks": (2, partial(DDPStrategy, **GLOO), {"shares": 2}),
    "fsdp, 2 ranks": (2, partial(FSDPStrategy, **GLOO), {"shares": 2, "num_shards": 2}),
    "pipeline 1f1b, 2 ranks": (
        2,
        partial(PipelineStrategy, num_microbatches=4, transport="gloo", **GLOO),
        {"num_microbatches": 4},
    ),
}
"""The number of ranks, the strategy, and how a plain loop does the same."""


def half_precision(setting: Setting) -> Iterator[Row]:
    with open_ranks(setting) as ranks:
        for compute in PRECISIONS:
            for name, (count, *_) in HALVES.items():
                what = f"MixedPrecision('{compute}'), {name}"
                try:
                    expected = ranks.run(1, expect_half, name, compute)[0]
                    parts = ranks.run(count, fit_half, name, compute)
                except CaseFailedError as error:
                    yield failed(what, error)
                    continue
                difference = largest_difference(parts, expected)
                found = "bit for bit" if difference == 0.0 else f"{difference:.1e}"
                row = within(what, difference, HALF_TOLERANCE, found)
                yield Row(what, found, f"bit for bit, or {row.wanted}", row.verdict)


def expect_half(setting: Setting, name: str, compute: str) -> dict[str, Tensor]:
    _, loop = PRECISIONS[compute]
    scale = {"scale": Scale(2.0**10)} if compute == "fp16" else {}
    device = str(setting.torch_device)
    return _on_cpu(half.expected(device=device, **HALVES[name][2], **loop, **scale).state)


def fit_half(setting: Setting, name: str, compute: str) -> dict[str, Tensor]:
    count, make, loop = HALVES[name]
    place = {"accelerator": setting.accelerator, "num_nodes": count}
    asked = half.Asked(PRECISIONS[compute][0], place, loop.get("shares", 1))
    return _on_cpu(half.fit(make(), 1, asked).state)


def _on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in state.items()}


# --- optimizers ----------------------------------------------------------------------------------

ADAMW = {"fused": {"fused": True}, "capturable": {"capturable": True, "foreach": True}}
WITH_ADAMW = {
    1: ("ddp", "fsdp", "tensor parallel", "pipeline 1f1b", "pipeline pipedream"),
    2: ("ddp", "fsdp", "tensor parallel", "pipeline 1f1b"),
}


class WithAdamW(Synced):
    """Trains with AdamW of some options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> Any:
        options = {"lr": 0.01, "weight_decay": 0.1, **self.options}
        return torch.optim.AdamW(self.parameters(), **options)


def optimizers(setting: Setting) -> Iterator[Row]:
    """Trains with fused and capturable AdamW beside one device with the same options.

    Capturable AdamW counts steps in float32, so it is not the ordinary one to the last digits.
    """
    with open_ranks(setting) as ranks:
        plain = ranks.run(1, fit_adamw, "one device", 1, {}, {})
        for kind, options in ADAMW.items():
            if kind == "capturable" and not setting.is_gpu:
                yield Row("AdamW(capturable=True)", "for GPUs", "", Verdict.LEFT_OUT)
                continue
            (expected,) = ranks.run(1, fit_adamw, "one device", 1, options, {})
            if kind == "fused":
                what = "AdamW(fused=True) beside AdamW(), one device"
                yield within(what, largest_difference(plain, expected), TOLERANCES[torch.float64])
            for count, names in WITH_ADAMW.items():
                for name in names:
                    yield _beside(ranks, kind, name, count, expected)


def _beside(ranks: Ranks, kind: str, name: str, count: int, expected: dict[str, Tensor]) -> Row:
    what = f"AdamW({kind}=True), {name}{f', {count} ranks' if count > 1 else ''}"
    backend, environment = GLOO if count > 1 else {}, dict[str, str]()
    if ranks.setting.is_gpu and count > 1 and name in REFUSED_OVER_GLOO:
        backend, environment = {"process_group_backend": "nccl"}, NCCL_ON_ONE_GPU
    given = name, count, ADAMW[kind], backend
    try:
        parts = ranks.run(count, fit_adamw, *given, environment=environment)
    except CaseFailedError as error:
        return failed(what, error)
    return within(what, largest_difference(parts, expected), TOLERANCES[torch.float64])


def fit_adamw(
    setting: Setting, name: str, count: int, options: dict[str, Any], backend: dict[str, Any]
) -> dict[str, Tensor]:
    make = partial(make_module, WithAdamW, **options)
    return fit(setting, name, count, backend, torch.float64, make)


# --- synchronised BatchNorm ----------------------------------------------------------------------


def batch_norm(setting: Setting) -> Iterator[Row]:
    """Trains BatchNorm over two replicas, with uneven batches, beside one device."""
    what = "sync_batchnorm=True, ddp, 2 ranks, uneven batches"
    with open_ranks(setting) as ranks:
        try:
            expected = ranks.run(1, fit_normed, 1)[0]
            found = ranks.run(2, fit_normed, 2)
        except CaseFailedError as error:
            yield failed(what, error)
            return
        differences = [largest_difference([state], expected) for state in found]
        yield within(what, max(differences), TOLERANCES[torch.float64])


def fit_normed(setting: Setting, count: int) -> dict[str, Tensor]:
    module = make_module(normed.Normed, momentum=0.1, affine=True)
    strategy = DDPStrategy(**GLOO) if count > 1 else "auto"
    trainer = trainer_of(setting, strategy, count, sync_batchnorm=count > 1, max_epochs=2)
    own = normed.batches(int(os.environ["RANK"]) if count > 1 else None)
    trainer.fit(module, DataLoader(own, batch_size=None))
    return _on_cpu(module.state_dict())


# --- deterministic mode --------------------------------------------------------------------------

REPEATED = {
    1: ("ddp", "fsdp", "pipeline 1f1b", "pipeline zbv", "pipeline pipedream"),
    2: ("ddp", "fsdp", "pipeline 1f1b"),
}


def deterministic(setting: Setting) -> Iterator[Row]:
    """Trains twice in deterministic mode."""
    with open_ranks(setting) as ranks:
        for count, names in REPEATED.items():
            for name in names:
                of_ranks = f", {count} ranks" if count > 1 else ""
                what = f"Trainer(deterministic=True) twice, {name}{of_ranks}"
                yield measured(ranks, what, count, repeat, name, count)


def repeat(setting: Setting, what: str, name: str, count: int) -> Row:
    backend = GLOO if count > 1 else {}
    try:
        one, other = (
            fit(setting, name, count, backend, torch.float32, deterministic=True) for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(False)
    is_same = all(torch.equal(one[parameter], other[parameter]) for parameter in one)
    verdict = Verdict.HOLDS if is_same else Verdict.FAILS
    return Row(what, "bit for bit" if is_same else "another result", "bit for bit", verdict)
