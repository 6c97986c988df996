"""Checks that a backward has computed all gradients that the replicas are about to average."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def check_gradients(without: Sequence[str]) -> None:
    """Checks that the backward has reached each trainable parameter."""
    if without:
        raise ValueError(
            f"The loss does not depend on {some_names(without)}. Freeze what is not trained with"
            " `requires_grad_(False)`, or, if other steps use it, pass"
            " find_unused_parameters=True (to a MeshStrategy in shard=ShardConfig(...), which with"
            " tp=... is what TensorParallelStrategy is)."
        )


def parameters_without_gradient(module: nn.Module) -> list[str]:
    """Names the trainable parameters that this rank's backward has not reached."""
    return [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]


def check_toggled(toggled: Sequence[str]) -> None:
    """Checks that a step has frozen no parameter whose gradient the replicas wait for."""
    if toggled:
        raise ValueError(
            f"The step has frozen {some_names(toggled)}, as `toggle_optimizer` does, and called"
            " backward: the gradients of the others would wait for theirs. Pass"
            " find_unused_parameters=True."
        )


def some_names(names: Sequence[str]) -> str:
    """Lists the first eight names, for an error."""
    return f"{list(names[:8])}{' and more' if len(names) > 8 else ''}"
