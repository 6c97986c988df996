"""Strategies at one rank beside a raw loop, in turns of a few batches in the same process.

The small GPT shows what a strategy costs the host: its kernels are short, so the device waits for
launches. The GPT of 124 M parameters (GPT-2's small shape; embedding and head are not tied) shows
what training loses.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist import (
    DDPStrategy,
    FSDPStrategy,
    MeshStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)
from lightning_dist.callbacks import MixedPrecision
from lightning_dist.engine.planning.devices import find_peak_flops
from recipes.gpt import build_gpt
from tests.benchmarks import contestants as c
from tests.benchmarks.data_parallel import shard_blocks
from tests.benchmarks.paired import TURN, Pair, Turns
from tests.gpu.ranks import attempt, beside_goal, trainer_of
from tests.gpu.records import Row, Verdict
from tests.gpu.setting import Setting

GOAL = 0.98
PLAIN_LOOP, FSDP_LOOP = "the plain compiled loop", "a plain FSDP2 loop with compiled layers"


@dataclass(frozen=True)
class Sizes:
    """A GPT, its batch, the number of turns, and the batches of a turn."""

    vocab: int
    width: int
    depth: int
    heads: int
    batch: int
    length: int
    turns: int
    turn: int = TURN

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.length

    @property
    def flops_per_token(self) -> int:
        """Forward and backward: the matrix products, and attention as if it were not causal."""
        products = self.depth * 12 * self.width**2 + self.vocab * self.width
        return 6 * products + 12 * self.depth * self.width * self.length

    def build(self) -> nn.Sequential:
        torch.manual_seed(0)
        return build_gpt(self.vocab, self.width, self.depth, self.heads)


TINY = Sizes(vocab=256, width=32, depth=2, heads=2, batch=2, length=16, turns=4)
SMALL = Sizes(vocab=256, width=256, depth=8, heads=4, batch=8, length=128, turns=20)


def gpt_124m(device: torch.device) -> Sizes:
    """Returns the size of GPT-2 small, with as large a batch as the device's memory takes."""
    gib = torch.cuda.get_device_properties(device).total_memory / 2**30
    batch = 16 if gib > 60 else 8 if gib > 30 else 4 if gib > 20 else 2
    return Sizes(
        vocab=50304, width=768, depth=12, heads=12, batch=batch, length=1024, turns=5, turn=12
    )


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


class Trained(c.PlainGPT):
    """The recipe's module on a model of any size; model and loss may be compiled."""

    def __init__(
        self, sizes: Sizes, compile_for: Setting | None = None, *, by_units: bool = False
    ) -> None:
        L.LightningModule.__init__(self)
        self.model = sizes.build()
        self._loss_of = cross_entropy
        if compile_for is not None:
            if not by_units:  # which a strategy compiles
                self.model = torch.compile(self.model, backend=compile_for.compiler)
            self._loss_of = torch.compile(cross_entropy, backend=compile_for.compiler)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        # Logs nothing, as the raw loop. Lightning reads a value for the progress bar in each step,
        # and the device is idle until the host has caught up.
        inputs, targets = batch
        return self._loss_of(self(inputs), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Sharded(Trained):
    """Shards itself, as Lightning's ModelParallelStrategy wants it."""

    def configure_model(self) -> None:
        shard_blocks(self.model, self.device_mesh["data_parallel"])


def loader_of(setting: Setting, sizes: Sizes, count: int) -> DataLoader[Any]:
    tokens = torch.randint(sizes.vocab, (count * sizes.batch, sizes.length + 1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    return DataLoader(data, batch_size=sizes.batch, pin_memory=setting.is_gpu)


def plain_loop(
    setting: Setting, sizes: Sizes, *, compiled: bool = False, half: bool = False
) -> c.RunBatch:
    """Returns a plain loop's step, with batches that are moved as Lightning moves them."""
    device = setting.torch_device
    net = sizes.build().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    loss_of = cross_entropy
    if compiled:
        # `net.compile()` would compile the layers of a sequence one by one.
        net = torch.compile(net, backend=setting.compiler)
        loss_of = torch.compile(cross_entropy, backend=setting.compiler)
    autocast = partial(torch.autocast, device.type, dtype=torch.bfloat16, enabled=half)

    def run(x: Tensor, y: Tensor) -> None:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        with autocast():
            logits = net(x)
        loss_of(logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def fsdp_loop(setting: Setting, sizes: Sizes) -> c.RunBatch:
    """Returns the step of FSDP2 in a plain loop, with compiled layers, in bf16."""
    device = setting.torch_device
    net = sizes.build().to(device)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for layer in net:
        layer.compile(backend=setting.compiler)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    loss_of = torch.compile(cross_entropy, backend=setting.compiler)

    def run(x: Tensor, y: Tensor) -> None:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss_of(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


@dataclass(frozen=True)
class Contest:
    """A fit beside a raw loop.

    Attributes:
        make: Makes the fit's strategy.
        module: Makes its module.
        options: Makes more arguments of its Trainer.
        raw: What the raw loop is called.
    """

    make: Callable[[], Any]
    module: Callable[..., L.LightningModule] = Trained
    options: Callable[[], dict[str, Any]] = dict
    raw: str = PLAIN_LOOP


def _single(setting: Setting) -> SingleDeviceStrategy:
    return SingleDeviceStrategy(device=setting.torch_device)


OURS: dict[str, Callable[[], Any]] = {
    "our DDPStrategy": DDPStrategy,
    "our FSDPStrategy": FSDPStrategy,
    "our PipelineStrategy, 1 stage": partial(PipelineStrategy, num_microbatches=1),
    "our TensorParallelStrategy": partial(
        TensorParallelStrategy, plan={"model.*.up": "colwise", "model.*.down": "rowwise"}
    ),
    "our MeshStrategy": MeshStrategy,
}
LIGHTNINGS_FSDP = partial(ModelParallelStrategy, data_parallel_size=1, tensor_parallel_size=1)


def small(setting: Setting) -> Iterator[Row]:
    sizes = SMALL if setting.is_gpu else TINY
    contests = {
        "Lightning, single device": Contest(partial(_single, setting)),
        "Lightning's DDPStrategy": Contest(LightningDDPStrategy),
        "Lightning's ModelParallelStrategy": Contest(LIGHTNINGS_FSDP, Sharded),
        **{name: Contest(make) for name, make in OURS.items()},
    }
    loop = partial(plain_loop, setting, sizes)
    for name, contest in contests.items():
        yield attempt(name, partial(_small_row, name, setting, sizes, contest, loop))


def _small_row(
    name: str, setting: Setting, sizes: Sizes, contest: Contest, loop: Callable[[], c.RunBatch]
) -> Row:
    turns = take_turns(setting, sizes, contest, loop).times
    (own, raw), ratio = turns.milliseconds(), statistics.median(turns.ratios())
    found = f"{own:.2f} ms per batch, raw loop {raw:.2f}; {ratio:.3f} x the raw loop"
    return Row(name, found)


def take_turns(
    setting: Setting, sizes: Sizes, contest: Contest, loop: Callable[[], c.RunBatch]
) -> Turns:
    """Lets a fit and a raw loop take turns on the device."""
    pair = Pair(contest.make, lambda _: loop(), devices=1, turn=sizes.turn)
    count = pair.turn * (sizes.turns + pair.warmup_turns) + 1
    raw_batches = iter(loader_of(setting, sizes, count + pair.turn))
    turns = Turns(pair, loop, raw_batches, setting.torch_device)
    options = {"callbacks": [], "limit_val_batches": 0, **contest.options()}
    options["callbacks"].append(turns)
    trainer = trainer_of(setting, contest.make(), **options)
    trainer.fit(contest.module(sizes), loader_of(setting, sizes, count))
    return turns


# --- 124 M parameters ----------------------------------------------------------------------------

# Model FLOPs utilisation that others publish for a device, each of a larger model than this one.
PUBLISHED: Mapping[str, tuple[str, float, str]] = MappingProxyType(
    {
        "H100": (
            "nanochat, 1.9 B parameters on 8 H100",
            0.509,
            "https://github.com/karpathy/nanochat/blob/06a1977/run1000.sh",
        ),
        "A100": (
            "litgpt's TinyLlama, 1.1 B parameters on 64 A100",
            0.52,
            "https://github.com/Lightning-AI/litgpt/blob/0495ecb/tutorials/pretrain_tinyllama.md",
        ),
    }
)


def half() -> dict[str, Any]:
    return {"precision": "bf16-mixed"}


def casts() -> dict[str, Any]:
    # The loss casts the logits itself, where that is compiled with it.
    return {"callbacks": [MixedPrecision("bf16", keep_fp32=("norm",))]}


def gpt(setting: Setting) -> Iterator[Row]:
    """Trains the recipe's GPT in bf16, compiled, beside a plain compiled loop."""
    sizes = gpt_124m(setting.torch_device) if setting.is_gpu else TINY
    torch._dynamo.config.recompile_limit = 64  # each contest may compile the same code anew
    what = "FlashAttention"
    yield attempt(what, partial(_flash_row, what, setting, sizes))
    compiled = partial(Trained, compile_for=setting)
    contests = {
        "Lightning's DDPStrategy, bf16-mixed": Contest(LightningDDPStrategy, compiled, half),
        "our DDPStrategy, bf16-mixed": Contest(DDPStrategy, compiled, half),
        "our DDPStrategy, MixedPrecision": Contest(DDPStrategy, compiled, casts),
        "our FSDPStrategy(compile=True), MixedPrecision": Contest(
            partial(FSDPStrategy, compile=True),
            partial(compiled, by_units=True),
            casts,
            FSDP_LOOP,
        ),
        "our PipelineStrategy, 1 stage, MixedPrecision": Contest(
            partial(PipelineStrategy, num_microbatches=1), compiled, casts
        ),
    }
    # One plain loop for all, and no reset: what is compiled serves the next one too.
    loops = {
        PLAIN_LOOP: cache(partial(plain_loop, setting, sizes, compiled=True, half=True)),
        FSDP_LOOP: partial(fsdp_loop, setting, sizes),
    }
    times: dict[str, list[float]] = {name: [] for name in loops}
    for name, contest in contests.items():
        given = name, setting, sizes, contest, loops[contest.raw], times[contest.raw]
        yield attempt(name, partial(_gpt_row, *given))
    for name, found in times.items():
        if found:
            yield Row(name, _speed(setting, sizes, statistics.median(found)))
    yield from _published(setting)


def _gpt_row(
    name: str,
    setting: Setting,
    sizes: Sizes,
    contest: Contest,
    loop: Callable[[], c.RunBatch],
    times: list[float],
) -> Row:
    turns = take_turns(setting, sizes, contest, loop).times
    (own, raw), ratio = turns.milliseconds(), statistics.median(turns.ratios())
    times.append(raw)
    found = f"{_speed(setting, sizes, own)}; {ratio:.3f} x {contest.raw}"
    if not name.startswith("our"):
        return Row(name, found)
    return beside_goal(name, found, setting, ratio, GOAL)


def _speed(setting: Setting, sizes: Sizes, milliseconds: float) -> str:
    tokens = sizes.tokens / milliseconds * 1e3
    name = torch.cuda.get_device_name(setting.torch_device) if setting.is_gpu else "cpu"
    peak = find_peak_flops(name, "bf16-mixed")
    mfu = "unknown" if peak is None else f"{tokens * sizes.flops_per_token / peak:.1%}"
    return f"{tokens:,.0f} tokens per second, MFU {mfu}"


def _flash_row(what: str, setting: Setting, sizes: Sizes) -> Row:
    if not setting.is_gpu:
        return Row(what, "for GPUs", "", Verdict.LEFT_OUT)
    shape = (sizes.batch, sizes.heads, sizes.length, sizes.width // sizes.heads)
    q = torch.randn(shape, device=setting.torch_device, dtype=torch.bfloat16)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):  # raises where it cannot be
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    return Row(what, "takes these shapes in bf16", "", Verdict.HOLDS)


def _published(setting: Setting) -> Iterator[Row]:
    name = torch.cuda.get_device_name(setting.torch_device) if setting.is_gpu else "cpu"
    found = [row for device, row in PUBLISHED.items() if device in name]
    for what, mfu, source in found:
        yield Row(f"published: {what}", f"MFU {mfu:.1%}", source)
    if not found:
        yield Row("published by others", f"no figure is known for {name}")
