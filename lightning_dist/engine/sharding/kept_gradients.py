"""Gradients that FSDP2 keeps whole on a rank, of backwards after which it reduces nothing.

They are no parameter's ``grad`` yet, so ``zero_grad`` does not reach them. Their attributes are
private in FSDP2: no public function drops them, or adds one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_dist.engine.sharding.gathered import param_groups


class KeptGradients:
    """The gradients that the units of some roots keep for the update they accumulate for."""

    def __init__(self, roots: Iterable[FSDPModule]) -> None:
        self._groups = param_groups(roots)

    def complete(self) -> None:
        """Adds zeros for the parameters of which no gradient is kept; call it before a backward.

        Under mixed precision gradients are kept in the dtype in which they will be reduced. FSDP2
        does not reduce them together with gradients in another dtype, which parameters have that
        are used in the last of the backwards only, or in none.
        """
        for group in self._groups:
            found = [(p, p.unsharded_accumulated_grad) for p in group.fsdp_params]
            dtypes = [gradient.dtype for _, gradient in found if gradient is not None]
            for parameter, gradient in found if dtypes else ():
                if gradient is None and parameter.sharded_param.requires_grad:
                    zeros = torch.zeros_like(parameter._unsharded_param, dtype=dtypes[0])
                    parameter.unsharded_accumulated_grad = zeros.requires_grad_(False)

    def not_reduced(self) -> list[nn.Parameter]:
        """Lists the sharded parameters of which a backward that reduces has kept gradients.

        FSDP2 reduces nothing more of a unit that a reentrant checkpoint calls, with gradients,
        when another of the unit's calls has had its backward.
        """
        return [
            parameter.sharded_param
            for group in self._groups
            if group.reduce_grads
            for parameter in group.fsdp_params
            if hasattr(parameter, "_unsharded_param")  # it has been gathered
            and (
                parameter._unsharded_param.grad is not None
                or parameter.unsharded_accumulated_grad is not None
            )
        ]

    def drop(self) -> None:
        """Drops what is kept for an update that never came, as ``zero_grad`` does elsewhere."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):  # it has been gathered
                    parameter._unsharded_param.grad = None
