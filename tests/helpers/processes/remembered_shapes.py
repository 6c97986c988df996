"""Shapes of what operations on DTensors return, found once per process.

torch finds them by running the operation on fake tensors, and remembers them by mesh. Each case has
a mesh of its own, and so would find them anew: a tenth of all time of the cases with shards. They
depend on the shapes of the arguments alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils import _pytree as pytree


def remember_shapes() -> None:
    """Lets this process remember shapes across meshes."""
    # Private: there is no public way to keep torch's caches beyond a mesh.
    find = ShardingPropagator._propagate_tensor_meta_non_cached
    known: dict[Hashable, Any] = {}

    def find_once(propagator: ShardingPropagator, schema: Any) -> Any:
        key = None if detect_fake_mode() else _key(schema)
        if key is None:
            return find(propagator, schema)
        if key not in known:
            known[key] = find(propagator, schema)
        return known[key]

    ShardingPropagator._propagate_tensor_meta_non_cached = find_once  # type: ignore[method-assign]


def _key(schema: Any) -> Hashable | None:
    """Returns what the shapes depend on; None if that may change, such as a symbol."""
    leaves, structure = pytree.tree_flatten((schema.args_schema, schema.kwargs_schema))
    # 1, 1.0 and True are equal, but have other dtypes.
    described = tuple(
        leaf.tensor_meta if isinstance(leaf, DTensorSpec) else (type(leaf), leaf) for leaf in leaves
    )
    if any(isinstance(leaf, torch.Tensor | torch.SymInt) for leaf in leaves):
        return None
    try:
        hash(described)
    except TypeError:
        return None
    return schema.op, described, structure, torch.get_default_dtype()
