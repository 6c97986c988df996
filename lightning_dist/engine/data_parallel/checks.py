"""Check that a backward has given all gradients that the replicas are about to average."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def check_gradients(without: Sequence[str]) -> None:
    """Checks that the backward has reached each trainable parameter.

    Args:
        without: Names of those that it has not, the same on all ranks.

    Raises:
        ValueError: There are some.
    """
    if without:
        raise ValueError(
            f"The loss does not depend on {_some(without)}. Freeze what is not trained with"
            " `requires_grad_(False)`, or, if other steps use it, pass"
            " find_unused_parameters=True (to a MeshStrategy in shard=ShardConfig(...), which with"
            " tp=... is what TensorParallelStrategy is)."
        )


def parameters_without_gradient(module: nn.Module) -> list[str]:
    """Names the trainable parameters that this rank's backward has not reached.

    Args:
        module: After a synchronised backward.
    """
    return [n for n, p in module.named_parameters() if p.requires_grad and p.grad is None]


def check_toggled(toggled: Sequence[str]) -> None:
    """Checks that no gradients are waited for that cannot come.

    Args:
        toggled: Names of parameters that are frozen for the moment, in the middle of a step.

    Raises:
        ValueError: They are.
    """
    if toggled:
        raise ValueError(
            f"The step has frozen {_some(toggled)}, as `toggle_optimizer` does, and called"
            " backward: the gradients of the others would wait for theirs. Pass"
            " find_unused_parameters=True."
        )


def _some(names: Sequence[str]) -> str:
    return f"{list(names[:8])}{' and more' if len(names) > 8 else ''}"
