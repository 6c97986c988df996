"""Ten steps of each strategy on a toy, compared with the same steps on one device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_dist.doctor.check import Check, Choice, Run
from lightning_dist.doctor.result import Result, fail, ok
from lightning_dist.engine.checkpoint.files import load_full
from lightning_dist.engine.common.mesh_shape import MeshShape

_NUM_STEPS = 10
_RATE, _MOMENTUM = 0.05, 0.9
_TOLERANCE = 1e-9  # float64, and sums in another order
_ROWS_PER_RANK = 4


class Toy(pl.LightningModule):
    """A sequence of layers that each strategy can train, in float64.

    Args:
        mesh: The mesh to be trained on; it determines sizes that it divides.
    """

    def __init__(self, mesh: MeshShape) -> None:
        super().__init__()
        width = 4 * mesh.tp
        layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(4 * mesh.pp)]
        self.model = nn.Sequential(*layers).double()
        self._rows = _ROWS_PER_RANK * mesh.world_size
        self._num_replicas = mesh.data_size

    def tensor_parallel_plan(self) -> dict[str, str]:
        """Returns how tensor-parallel ranks shard the layers."""
        return {"model.*.0": "colwise_gather"}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        x, y = batch
        return F.mse_loss(self.model(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=_RATE, momentum=_MOMENTUM)

    def data(self) -> TensorDataset:
        """Returns the samples of all steps, the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        width = next(self.model.parameters()).shape[-1]
        shape = (_NUM_STEPS * self._rows, width)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return TensorDataset(x, x.roll(1, -1).tanh())

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Returns this replica's share of each batch."""
        data = self.data()
        sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
            data, shuffle=False, **self.trainer.distributed_sampler_kwargs or {}
        )
        return DataLoader(data, batch_size=self._rows // self._num_replicas, sampler=sampler)


def train_alone(mesh: MeshShape) -> dict[str, Tensor]:
    """Trains the toy in a plain loop on the CPU; returns its weights."""
    toy = _seeded(mesh)
    optimizer = toy.configure_optimizers()
    for batch in DataLoader(toy.data(), batch_size=_ROWS_PER_RANK * mesh.world_size):
        optimizer.zero_grad()
        toy.training_step(batch, 0).backward()
        optimizer.step()
    return toy.state_dict()


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What became of ten steps; of rank 0, others have the default."""

    deviation: float = 0.0  # by how much a weight differs at most from that of one device
    is_finite: bool = True  # whether all weights are finite


def probe_steps(run: Run, choice: Choice) -> StepFacts:
    """Trains ten steps with a strategy, and saves and loads a checkpoint."""
    mesh = run.meshes[choice.name]
    path = run.options.root / ".lightning_dist_doctor.ckpt"
    with _quiet():
        trainer = pl.Trainer(
            strategy=choice.build(
                timeout_s=run.options.seconds, save_full=True, check_environment="off"
            ),
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=len([rank for rank, host in run.hosts.items() if host == run.hosts[0]]),
            num_nodes=len(set(run.hosts.values())),
            max_steps=_NUM_STEPS,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=run.options.root,
        )
        trainer.fit(_seeded(mesh))
        trainer.save_checkpoint(path)
    return StepFacts() if run.launch.rank else _compare(path, train_alone(mesh))


def _compare(path: Path, right: Mapping[str, Tensor]) -> StepFacts:
    weights = load_full(path)["state_dict"]
    path.unlink()
    deviation = max((weights[name].cpu() - right[name]).abs().max().item() for name in right)
    return StepFacts(deviation, all(bool(weight.isfinite().all()) for weight in weights.values()))


def judge_steps(run: Run, facts: Mapping[int, StepFacts], *, choice: Choice) -> Result:
    """Judges the weights that a strategy has trained."""
    own, mesh = facts[0], run.meshes[choice.name]
    sizes = " x ".join(f"{name} {size}" for name, size in mesh.sizes.items() if size > 1)
    where = f"ten steps on {sizes or 'one rank'}"
    if not own.is_finite:
        return fail(f"{where}: weights are not finite", "Please report it, with this output.")
    if not choice.is_exact:
        return ok(f"{where}: done; its weights are stale by design, and not compared")
    if own.deviation > _TOLERANCE:
        return fail(
            f"{where}: a weight differs by {own.deviation:.1e} from one device's",
            "Do not train there. Run `all-reduce` again; if that is right, please report it.",
        )
    return ok(f"{where}: equal to one device ({own.deviation:.0e} at most)")


def step_check(choice: Choice, seconds: float) -> Check[StepFacts]:
    """Returns the check of a strategy's steps."""
    return Check(
        choice.name,
        partial(probe_steps, choice=choice),
        partial(judge_steps, choice=choice),
        "See the error above it; the checks of links and disk say more.",
        4 * seconds,
        in_main_thread=True,
    )


def _seeded(mesh: MeshShape) -> Toy:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return Toy(mesh)


@contextmanager
def _quiet() -> Iterator[None]:
    """Mutes Lightning's lines and warnings."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
