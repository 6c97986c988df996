"""Measure what a mesh's ranks take to exchange tensors, as training does it.

Units of parameters are gathered and their gradients reduced by FSDP2 itself; small layers run
tensor parallel, and as stages. So copies, hooks and threads count with what is sent.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.engine.comms.connect import connect
from lightning_dist.engine.pipeline.pipeline import Pipeline
from lightning_dist.engine.planning.collectives import ring
from lightning_dist.engine.planning.links import Link, LinksByKind, fit_link
from lightning_dist.engine.planning.traffic import MessageKind
from lightning_dist.engine.profiling.links import (
    FEW_SIZES,
    SHORT,
    fit_ring,
    measure_all_reduce,
    measure_links,
    time_on_slowest_rank,
)
from lightning_dist.engine.schedules.registry import PipelineShape
from lightning_dist.strategies.mesh_runtime.measuring.updates import optimizer_of

_LAST_BYTES = 1 << 22
_NUM_UNITS = 4
_TINY = 1e-7  # seconds; a difference of two measured times may be below zero
_WIDTH = 64
_NUM_UPDATED = 8


def measure_axis(mesh: DeviceMesh, device: torch.device, parameters_per_unit: int) -> LinksByKind:
    """Measures an axis of a mesh. Collective: every rank of the world must call it.

    Args:
        mesh: This rank's part of the mesh along the axis, of several ranks.
        device: Device of the tensors that are sent.
        parameters_per_unit: Number of tensors that a unit's bytes are shared out to, as in the
            model: each is copied, and becomes a DTensor, by itself.

    Returns:
        The links of a message, of gathering a unit's shards, of reducing its gradients, and of an
        all-reduce.
    """
    (fit,) = measure_links(mesh, _LAST_BYTES).values()
    times = _unit_seconds(mesh, device, parameters_per_unit)
    found = {kind: fit_ring(ring(kind), mesh.size(), times[kind]) for kind in times}
    found[MessageKind.ALL_REDUCE] = measure_all_reduce(mesh.get_group(), device)
    return LinksByKind(fit.link, found)


def measure_alone(mesh: DeviceMesh, device: torch.device, parameters_per_unit: int) -> LinksByKind:
    """Measures units that a rank shares with no other, as of replicas.

    Collective: every rank of the world must call it.
    """
    times = _unit_seconds(mesh, device, parameters_per_unit)
    return LinksByKind(
        Link(0.0, float("inf")),
        {kind: fit_link(FEW_SIZES, seconds).link for kind, seconds in times.items()},
    )


def measure_tensor_layers(mesh: DeviceMesh, device: torch.device) -> float:
    """Returns a tensor-parallel layer's seconds in a forward and backward, beside the computation.

    Collective: every rank of the world must call it.
    """
    sample = torch.zeros(_WIDTH, _WIDTH, device=device)

    def build() -> nn.Sequential:
        linears = [nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(_NUM_UNITS)]
        return nn.Sequential(*linears)

    sharded, whole = build(), build()
    styles = [ColwiseParallel(), RowwiseParallel()] * (_NUM_UNITS // 2)
    parallelize_module(sharded, mesh, {str(i): style for i, style in enumerate(styles)})
    steps = (partial(_step, each, sample) for each in (sharded, whole))
    seconds = [time_on_slowest_rank(step, device, SHORT) for step in steps]
    # A layer of a pair sends forward, the other one backward.
    small = measure_all_reduce(mesh.get_group(), device)
    sent = ring(MessageKind.ALL_REDUCE).seconds(mesh.size(), sample.nbytes, small)
    return max(0.0, (seconds[0] - seconds[1]) / _NUM_UNITS - sent)


def measure_updates(mesh: DeviceMesh, device: torch.device, states_per_parameter: int) -> float:
    """Returns what a DTensor's update takes of its host, beside computing.

    Collective: every rank of the world must call it.
    """
    seconds = []
    for is_sharded in (True, False):
        parameters: list[Tensor] = []
        for _ in range(_NUM_UPDATED):
            value = torch.zeros(_WIDTH, device=device)
            if is_sharded:
                value = DTensor.from_local(value, mesh, [Replicate(), Shard(0)], run_check=False)
            parameters.append(nn.Parameter(value))
            parameters[-1].grad = torch.zeros_like(value)
        step = optimizer_of(parameters, states_per_parameter).step
        step()
        seconds.append(time_on_slowest_rank(step, device, SHORT))
    return max(0.0, (seconds[0] - seconds[1]) / _NUM_UPDATED)


def measure_stages(shape: MeshShape, rank: int, timeout_seconds: float) -> float:
    """Returns what a micro-batch takes of a stage's host, beside computing and sending.

    It runs on CPUs. Collective: every rank of the world must call it.
    """
    device, group = torch.device("cpu"), shape.peers(rank, "pp")
    channels = connect(shape.groups("pp"), device, timeout_seconds)
    few, many = 2 * shape.pp, 6 * shape.pp
    seconds = []
    try:
        for count in (few, many):
            place = PipelineShape("1f1b", count, (1,) * shape.pp, group.index(rank))
            module = nn.Sequential(*[nn.Linear(1, 1) for _ in group])
            pipeline = Pipeline(module, place, channels.links)
            batch = partial(_train_batch, pipeline, module, torch.zeros(count, 1))
            seconds.append(time_on_slowest_rank(batch, device))
    except BaseException:
        channels.close(failed=True)
        raise
    channels.close()
    return max(0.0, (seconds[1] - seconds[0]) / (many - few))


def _train_batch(pipeline: Pipeline, module: nn.Module, sample: Tensor) -> None:
    pipeline.train_batch(sample, lambda part: module(part.content).sum())
    pipeline.install_gradients()
    with pipeline.updating():
        pass


class _Unit(nn.Module):
    """Has parameters, and computes next to nothing with them."""

    def __init__(self, numel: int, count: int, device: torch.device) -> None:
        super().__init__()
        each = max(1, numel // count)
        self.weights = nn.ParameterList(torch.zeros(each, device=device) for _ in range(count))

    @override
    def forward(self, value: Tensor) -> Tensor:
        for weight in self.weights:
            value = value + weight[0]
        return value


def _unit_seconds(
    mesh: DeviceMesh, device: torch.device, count: int
) -> dict[MessageKind, list[float]]:
    """Returns the seconds of gathering a unit, and of reducing it, for each of some sizes."""
    gathers, reductions = [], []
    sample = torch.zeros(1, device=device)
    for num_bytes in FEW_SIZES:
        whole, sharded = (
            nn.Sequential(*[_Unit(num_bytes // 4, count, device) for _ in range(_NUM_UNITS)])
            for _ in range(2)
        )
        units = [fully_shard(unit, mesh=mesh, reshard_after_forward=False) for unit in sharded]
        fully_shard(sharded, mesh=mesh, reshard_after_forward=False)
        steps = (partial(_step, each, sample) for each in (whole, sharded))
        own, both = (time_on_slowest_rank(step, device, SHORT) for step in steps)
        gather = time_on_slowest_rank(partial(_gather, units), device, SHORT)
        gathers.append(max(_TINY, gather / _NUM_UNITS))
        reductions.append(max(_TINY, (both - own - gather) / _NUM_UNITS))
    return {MessageKind.ALL_GATHER: gathers, MessageKind.REDUCE_SCATTER: reductions}


def _step(module: nn.Module, sample: Tensor) -> None:
    module(sample).sum().backward()
    for parameter in module.parameters():
        parameter.grad = None


def _gather(units: Iterable[FSDPModule]) -> None:
    for unit in units:
        unit.unshard()
        unit.reshard()
