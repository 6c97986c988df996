"""What a dry run says is what real ranks hold and send; and it says so for large meshes, too."""

from __future__ import annotations

import resource
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_dist import MeshStrategy
from lightning_dist.engine.comms.channel import MemoryChannel
from lightning_dist.engine.parallelize.shard_config import ShardConfig
from lightning_dist.engine.planning.dry_run_report import DryRunSummary, RankKind
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.tensor_parallel.config import TensorConfig
from lightning_dist.engine.tensors.tree import tensors_in
from recipes.gpt import GPT, build_gpt
from tests.helpers.gpt_parity import BATCH_SIZE, data, make_gpt
from tests.helpers.networks.models import make_trainer
from tests.helpers.processes.workers import WorkerPool

Counts = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""Messages and their bytes, by kind and axes."""

OPERATIONS = {
    "c10d._allgather_base_.default": "all-gather",
    "_c10d_functional.all_gather_into_tensor.default": "all-gather",
    "c10d._reduce_scatter_base_.default": "reduce-scatter",
    "_c10d_functional.reduce_scatter_tensor.default": "reduce-scatter",
    "c10d.allreduce_.default": "all-reduce",
    "_c10d_functional.all_reduce.default": "all-reduce",
}


@dataclass
class Held:
    """What a real rank has after a step.

    Attributes:
        parameters: Bytes.
        gradients: Bytes.
        optimizer_state: Bytes, moments only.
        sent: In the step.
        said: By the dry run before it, in the same process.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer_state: int = 0
    sent: Counts = field(default_factory=dict)
    said: DryRunSummary | None = None


@dataclass(frozen=True)
class Case:
    """A mesh, and what is special about it."""

    sizes: dict[str, int]
    tensor: dict[str, Any] = field(default_factory=dict)
    shard: dict[str, Any] = field(default_factory=dict)
    schedule: Any = "1f1b"
    tied: bool = False

    @property
    def world_size(self) -> int:
        return self.strategy().mesh_shape(torch.Size(self.sizes.values()).numel()).world_size

    def strategy(self) -> MeshStrategy:
        return MeshStrategy(
            **{"dp_shard": 1, **self.sizes},
            pipeline=PipelineConfig(schedule=self.schedule, num_microbatches=2),
            tensor=TensorConfig(**self.tensor),
            shard=ShardConfig(**self.shard),
        )


class Counting(TorchDispatchMode):
    """Counts what goes over the groups of torch's mesh; ranks agree on a run over others.

    Whole replicas average over the group of all ranks, in which they agree on nothing in a step.
    """

    def __init__(self, strategy: MeshStrategy) -> None:
        super().__init__()
        mesh = strategy.mesh_of_ranks
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        names = mesh.mesh_dim_names
        self._axes = {mesh.get_group(n).group_name: n for n in names if mesh[n].size() > 1}
        if strategy.replicates(strategy.mesh):
            self._axes[strategy.data_group.group_name] = "dp_replicate"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if str(func) in OPERATIONS:
            axis = next((self._axes[g] for a in args if (g := _group(a)) in self._axes), None)
            if axis is not None:
                self.note(OPERATIONS[str(func)], axis, [*args, result])
        return result

    def note(self, kind: str, axis: str, tensors: list[Any]) -> None:
        flat = [t for v in tensors for t in (v if isinstance(v, list | tuple) else [v])]
        self.counts[kind, axis] += 1
        self.bytes[kind, axis] += max(t.nbytes for t in flat if isinstance(t, Tensor))

    @property
    def sent(self) -> Counts:
        return {(kind, (a,)): (n, self.bytes[kind, a]) for (kind, a), n in self.counts.items()}


def _group(argument: Any) -> str | None:
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument).group_name
        except RuntimeError:  # a reduction, say
            return None
    return argument if isinstance(argument, str) else None


def train_a_step(case: Case) -> Held:
    """Tries a step, trains one on real ranks, and looks at it."""
    held, module = Held(), make_gpt()
    if case.tied:
        module.model[-1].logits.weight = module.model[0].token.weight
    batch = torch.empty(2, BATCH_SIZE, 8, dtype=torch.int64, device="meta").unbind()
    held.said = case.strategy().dry_run(module, case.world_size, sample_batch=batch)
    strategy = case.strategy()
    options: dict[str, Any] = {"max_steps": 1, "limit_val_batches": 0}
    trainer = make_trainer(devices=case.world_size, strategy=strategy, **options)
    step = strategy.optimizer_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        with Counting(strategy) as counting:
            if case.sizes.get("pp", 1) > 1:
                channels = strategy.sharded.session.channels
                links, ties = channels.links, channels.ties
                ways = (links.outgoing, ties.outgoing)
                for sender in dict.fromkeys(s for senders in ways for s in senders.values()):
                    if not isinstance(sender, MemoryChannel):
                        sender.send = partial(_noted, counting, sender.send)
            result = step(*args, **kwargs)
        held.sent = counting.sent
        return result

    def look_at_gradients(_: Any) -> None:
        held.gradients = _bytes(p.grad for p in module.parameters() if p.grad is not None)

    strategy.optimizer_step = counted
    module.on_before_optimizer_step = look_at_gradients
    loader = DataLoader(data(), BATCH_SIZE)
    trainer.fit(module, loader, loader)
    held.parameters = _bytes(module.parameters())
    states = trainer.optimizers[0].state.values()
    held.optimizer_state = _bytes(s[name] for s in states for name in ("exp_avg", "exp_avg_sq"))
    return held


def _noted(counting: Counting, send: Any, tree: Any, **numbers: int) -> None:
    counting.counts["send", "pp"] += 1
    counting.bytes["send", "pp"] += sum(t.nbytes for t in tensors_in(tree))
    send(tree, **numbers)


def _bytes(tensors: Any) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def _sent(kind: RankKind) -> Counts:
    return {(str(t.kind), t.axes): (t.count, t.num_bytes) for t in kind.traffic}


BOTH = {"sequence_parallel": True, "loss_parallel": True}

CASES = {
    "shards 2": Case({"dp_shard": 2}),
    "replicas 2": Case({"dp_replicate": 2}),
    "tp 2": Case({"tp": 2}),
    "pp 2, gpipe": Case({"pp": 2}, schedule="gpipe"),
    "pp 2, head and embedding tied": Case({"pp": 2}, tied=True),
    "shards 2 x tp 2, both, recomputed": Case(
        {"dp_shard": 2, "tp": 2}, BOTH, {"activation_checkpointing": "full"}
    ),
    "replicas 2 x shards 2, kept whole": Case(
        {"dp_replicate": 2, "dp_shard": 2}, shard={"reshard_after_forward": False}
    ),
    "pp 2, interleaved_1f1b": Case({"pp": 2}, schedule="interleaved_1f1b"),
    "pp 2, zbv, head and embedding tied on one rank": Case({"pp": 2}, schedule="zbv", tied=True),
    "pp 2 x shards 2, looped_bfs": Case({"pp": 2, "dp_shard": 2}, schedule="looped_bfs"),
    "pp 2 x tp 2": Case({"pp": 2, "tp": 2}),
    "pp 2 x shards 2, zb_h1": Case({"pp": 2, "dp_shard": 2}, schedule="zb_h1"),
    "pp 2 x shards 2, gathered again": Case(
        {"pp": 2, "dp_shard": 2}, shard={"reshard_after_forward": True}
    ),
}


@pytest.mark.some("pp 2 x shards 2, zb_h1", "tp 2")
@pytest.mark.parametrize("name", CASES)
def test_says_what_real_ranks_hold_and_send(
    workers: WorkerPool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    case = CASES[name]
    for rank, held in enumerate(workers.run(case.world_size, train_a_step, case, timeout=110.0)):
        assert held.said is not None
        kind = held.said.kind_of(rank)
        assert kind.parameter_bytes == held.parameters > 0
        assert kind.gradient_bytes == held.gradients > 0
        assert kind.optimizer_state_bytes == held.optimizer_state > 0
        assert _sent(kind) == held.sent


def test_a_dimension_that_does_not_divide(workers: WorkerPool) -> None:
    first, second, third = workers.run(3, train_a_step, Case({"dp_shard": 3}), timeout=110.0)
    assert first.said is not None
    kind = first.said.kind_of(0)
    assert kind.parameter_bytes == first.parameters >= second.parameters > third.parameters
    assert all(_sent(kind) == held.sent for held in (first, second, third))


# --- a large mesh ------------------------------------------------------------------------------

WIDTH, DEPTH, VOCABULARY, MICROBATCHES = 4096, 32, 32_000, 4
LARGE = {"pp": 4, "dp_replicate": 2, "dp_shard": 16, "tp": 8}
FLOAT = 4


class LargeGPT(GPT):
    """Seven billion parameters, if built."""

    def __init__(self) -> None:
        super().__init__(width=8, depth=1)
        self.model = nn.Sequential()

    def configure_model(self) -> None:
        if not len(self.model):
            self.model = build_gpt(VOCABULARY, WIDTH, DEPTH, num_heads=32)


def try_large() -> tuple[DryRunSummary, int, int]:
    """Tries a step; gives what was said, the parameters left in the module, and the peak memory."""
    module = LargeGPT()
    strategy = MeshStrategy(**LARGE, pipeline=PipelineConfig(num_microbatches=MICROBATCHES))
    batch = torch.empty(2, 8, 2048, dtype=torch.int64, device="meta").unbind()
    said = strategy.dry_run(module, 1024, sample_batch=batch)
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return said, len(list(module.parameters())), peak_bytes


@pytest.fixture(scope="module")
def large(workers: WorkerPool) -> DryRunSummary:
    ((said, num_left, peak_bytes),) = workers.run(1, try_large, timeout=110.0)
    assert num_left == 0
    assert peak_bytes < 4e9
    return said


@pytest.mark.long
def test_bytes_of_seven_billion_parameters(large: DryRunSummary) -> None:
    matrices = 12 * WIDTH * WIDTH / LARGE["tp"]
    block = matrices + 2 * WIDTH
    table = VOCABULARY * WIDTH / LARGE["tp"]
    layers = {0: table + 8 * block, 1: 8 * block, 2: 8 * block, 3: 8 * block + WIDTH + table}
    assert sum(kind.num_ranks for kind in large.kinds) == 1024
    assert [kind.stages for kind in large.kinds] == [(0,), (1, 2), (3,)]
    for stage, num_parameters in layers.items():
        kind = large.kind_of(256 * stage)
        assert kind.parameter_bytes == FLOAT * num_parameters / LARGE["dp_shard"]
        assert kind.gradient_bytes == kind.parameter_bytes
        assert kind.optimizer_state_bytes == 2 * kind.parameter_bytes


@pytest.mark.long
def test_messages_of_seven_billion_parameters(large: DryRunSummary) -> None:
    activation = FLOAT * (8 // MICROBATCHES) * 2048 * WIDTH
    units = 8 * (12 * WIDTH * WIDTH // LARGE["tp"] + 2 * WIDTH) * FLOAT
    assert _sent(large.kind_of(256)) == {
        ("all-gather", ("dp_shard",)): (8, units),
        ("reduce-scatter", ("dp_shard",)): (8, units),
        ("all-reduce", ("dp_replicate",)): (8, units // LARGE["dp_shard"]),
        # Into and out of attention and MLP, forward and backward.
        ("all-reduce", ("tp",)): (8 * 4 * MICROBATCHES, 8 * 4 * MICROBATCHES * activation),
        ("send", ("pp",)): (2 * MICROBATCHES, 2 * MICROBATCHES * activation),
    }
