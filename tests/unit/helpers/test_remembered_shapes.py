from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.helpers.processes.remembered_shapes import remember_shapes

ADD = torch.ops.aten.add.Tensor


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Schemas whose shapes torch has found, while this process remembers them."""
    schemas: list[Any] = []
    own = ShardingPropagator._propagate_tensor_meta_non_cached

    def find(propagator: ShardingPropagator, schema: Any) -> Any:
        schemas.append(schema)
        return own(propagator, schema)

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", find)
    remember_shapes()
    return schemas


def shape_of(ranks: list[int], dtype: torch.dtype, other: object) -> Any:
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
    meta = TensorMeta(torch.Size([2, 3]), (3, 1), dtype)
    spec = DTensorSpec(mesh, (Replicate(),), tensor_meta=meta)
    return ShardingPropagator()._propagate_tensor_meta(OpSchema(ADD, (spec, other), {}))


def test_another_mesh_has_the_same_shapes(found: list[Any]) -> None:
    first = shape_of([0, 1], torch.float64, 1.0)
    assert first == TensorMeta(torch.Size([2, 3]), (3, 1), torch.float64)
    assert shape_of([0, 1, 2], torch.float64, 1.0) is first
    assert len(found) == 1


def test_a_number_of_another_type_may_give_another_dtype(found: list[Any]) -> None:
    assert shape_of([0, 1], torch.int64, 1).dtype == torch.int64
    assert shape_of([0, 1], torch.int64, 1.0).dtype == torch.float32
    assert len(found) == 2
