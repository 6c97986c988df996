"""The user's configuration of shards over the data axes, its checks, and what is derived from it.

A mesh may have nothing to shard. Then the same arguments say how replicas average gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

import torch

from lightning_dist.engine.common.names import check_choice, check_count
from lightning_dist.engine.data_parallel.ddp_options import Compression, GradientExchange
from lightning_dist.engine.sharding.fully_shard import ShardingOptions
from lightning_dist.engine.sharding.wrap import WrapPolicy, parse_policy

Offload = Literal["none", "cpu"]
ActivationCheckpointing = Literal["none", "full", "selective"]
Sharded = Literal["parameters", "gradients", "optimizer"]
ReduceDtype = Literal["float32", "bfloat16", "float16"]
_COMPRESSION: Mapping[ReduceDtype, Compression] = MappingProxyType(
    {"float32": "none", "bfloat16": "bf16", "float16": "fp16"}
)


@dataclass(frozen=True)  # without slots, which the command line's parser does not take
class ShardConfig:
    """The arguments of :class:`~lightning_dist.FSDPStrategy` of the same names.

    Attributes:
        wrap: Chooses the modules that become units.
        reshard_after_forward: Free gathered parameters between forward and backward.
        offload: Where shards, gradients and optimizer state are kept.
        activation_checkpointing: Which activations are computed again.
        reduce_dtype: Dtype in which gradients are reduced, under mixed precision.
        sync_every_microstep: Reduce gradients in each backward while they accumulate.
        compile: Compile the units' forwards; of nested units, the innermost.
        find_unused_parameters: Allow steps that do not use all parameters.

    Raises:
        ValueError: An argument is unknown, or two arguments exclude each other.
    """

    wrap: str | WrapPolicy = "auto"
    reshard_after_forward: bool | int | Literal["auto"] = "auto"
    offload: Offload = "none"
    activation_checkpointing: ActivationCheckpointing | Sequence[str] = "none"
    reduce_dtype: ReduceDtype = "float32"
    sync_every_microstep: bool = False
    compile: bool = False
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_choice("offload", self.offload, get_args(Offload))
        check_choice("reduce_dtype", self.reduce_dtype, get_args(ReduceDtype))
        ranks = self.reshard_after_forward
        if ranks != "auto" and not isinstance(ranks, bool):
            others = "'auto', True, False"
            check_count("reshard_after_forward", ranks, at_least=2, instead=others)
        again = self.activation_checkpointing
        if isinstance(again, str) or not isinstance(again, Sequence):
            check_choice("activation_checkpointing", again, get_args(ActivationCheckpointing))
        if self.compile and again == "selective":
            raise ValueError(
                "activation_checkpointing='selective' looks at each operation, and with"
                " compile=True it sees none. Use 'full', or leave compile out."
            )
        parse_policy(self.wrap)

    @property
    def policy(self) -> WrapPolicy:
        """The policy that chooses the units."""
        return parse_policy(self.wrap)

    def options(self, param_dtype: torch.dtype | None) -> ShardingOptions:
        """Returns the options of the units.

        Args:
            param_dtype: Dtype in which units compute under mixed precision; else None.
        """
        return ShardingOptions(
            None if self.reshard_after_forward == "auto" else self.reshard_after_forward,
            param_dtype,
            reduce_dtype=None if param_dtype is None else getattr(torch, self.reduce_dtype),
            offload=self.offload == "cpu",
        )

    def exchange(self, param_dtype: torch.dtype | None, *, is_manual: bool) -> GradientExchange:
        """Returns how gradients are averaged where FSDP has nothing to shard.

        Args:
            param_dtype: As for :meth:`options`.
            is_manual: Whether a step calls backward by itself, maybe for one of several optimizers.
        """
        return GradientExchange(
            compression="none" if param_dtype is None else _COMPRESSION[self.reduce_dtype],
            find_unused_parameters=self.find_unused_parameters or is_manual,
        )
