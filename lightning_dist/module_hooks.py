"""The hooks around a module's forward.

No public function lists a module's hooks, or a tensor's, or removes them without their handles.
Three private names of torch, here and nowhere else; tests of who asks see it when they change.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def hooks_of(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Gives those behind the forward of a module itself, and those before it; to be changed, too.

    Args:
        module: Any.
    """
    return module._forward_hooks, module._forward_pre_hooks


def hooks_of_tensor(tensor: Tensor) -> list[Any]:
    """Gives those that see a tensor's gradient.

    Args:
        tensor: A leaf.
    """
    return list((tensor._backward_hooks or {}).values())
