"""Ten steps of each strategy on a toy, compared with the same steps on one device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist.doctor.check import Build, Check, Run, worst_of
from lightning_dist.doctor.report import Result, fail, ok
from lightning_dist.engine.checkpoint.files import load_full
from lightning_dist.engine.common.mesh_shape import MeshShape
from lightning_dist.strategies.pipeline import PipelineStrategy

_NUM_STEPS = 10
_TOLERANCE = 1e-9  # float64, and sums in another order
_ROWS_PER_RANK = 4


class Toy(pl.LightningModule):
    """Layers in float64 that each strategy can train, of sizes that the mesh divides."""

    def __init__(self, mesh: MeshShape) -> None:
        super().__init__()
        self._width, self._rows = 4 * mesh.tp, _ROWS_PER_RANK * mesh.world_size
        self._num_replicas = mesh.data_size
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            layers = [nn.Linear(self._width, self._width) for _ in range(4 * mesh.pp)]
        self.model = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers)).double()

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Returns how tensor-parallel ranks shard the layers."""
        return {"model.*.0": "colwise_gather"}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns this replica's share of each batch; Lightning's own sampler would shuffle."""
        replicas, data = self.trainer.distributed_sampler_kwargs or {}, self.data()
        sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=False, **replicas)
        return DataLoader(data, self._rows // self._num_replicas, sampler=sampler)

    def data(self) -> TensorDataset:
        """Returns the samples of all steps, the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        shape = (_NUM_STEPS * self._rows, self._width)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return TensorDataset(x, x.roll(1, -1).tanh())


def train_alone(mesh: MeshShape) -> dict[str, Tensor]:
    """Trains the toy in a plain loop on the CPU; returns its weights."""
    toy = Toy(mesh)
    optimizer = toy.configure_optimizers()
    for batch in DataLoader(toy.data(), _ROWS_PER_RANK * mesh.world_size):
        optimizer.zero_grad()
        toy.training_step(batch, 0).backward()
        optimizer.step()
    return toy.state_dict()


def check_steps(run: Run, name: str, build: Build) -> Result:
    """Trains ten steps with a strategy, and saves a checkpoint, which rank 0 compares."""
    mesh, path = run.meshes[name], run.root / ".lightning_dist_doctor.ckpt"
    strategy = build(timeout_s=run.seconds, save_full=True, check_environment="off")
    with _quiet():
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=len(run.ranks_beside(0)),
            num_nodes=len(set(run.hosts.values())),
            max_steps=_NUM_STEPS,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=run.root,
        )
        trainer.fit(Toy(mesh))
        trainer.save_checkpoint(path)
    if run.launch.rank:
        return ok("rank 0 compares the weights")
    weights = load_full(path)["state_dict"]
    path.unlink()
    is_exact = not (isinstance(strategy, PipelineStrategy) and strategy.asynchronous)
    return judge_weights(mesh, weights, train_alone(mesh), is_exact=is_exact)


def judge_weights(
    mesh: MeshShape, weights: Mapping[str, Tensor], right: Mapping[str, Tensor], *, is_exact: bool
) -> Result:
    """Judges the weights that a strategy has trained, by the right ones if it is exact."""
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.sizes.items() if size > 1)
    where = f"ten steps on {sizes or 'one rank'}"
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        return fail(f"{where}: weights are not finite", "Please report it, with this output.")
    if not is_exact:
        return ok(f"{where}: done; its weights are stale by design, and not compared")
    deviation = max((weights[name].cpu() - right[name]).abs().max().item() for name in right)
    if deviation > _TOLERANCE:
        return fail(
            f"{where}: a weight differs by {deviation:.1e} from one device's",
            "Do not train there. Run `all-reduce` again; if that is right, please report it.",
        )
    return ok(f"{where}: equal to one device ({deviation:.0e} at most)")


def step_check(name: str, build: Build, seconds: float) -> Check[Result]:
    """Returns the check of a strategy's steps."""
    return Check(
        name,
        partial(check_steps, name=name, build=build),
        worst_of,
        "See the error above it; the checks of links and disk say more.",
        4 * seconds,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Mutes lines and warnings of Lightning and of tensors that are sharded twice."""
    loggers = [logging.getLogger(it) for it in ("lightning.pytorch", "torch.distributed.tensor")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
