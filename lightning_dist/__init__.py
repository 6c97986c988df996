"""Distributed strategies for PyTorch Lightning.

Importing this package registers its strategies' names, so that
``L.Trainer(strategy="pipeline_pipedream")`` works after ``import lightning_dist``.
"""

from lightning_dist.engine.data_parallel.local_config import OuterOptimizer
from lightning_dist.planner import plan
from lightning_dist.registration import register_strategies
from lightning_dist.strategies.auto import AutoStrategy
from lightning_dist.strategies.ddp import DDPStrategy
from lightning_dist.strategies.fsdp import FSDPStrategy
from lightning_dist.strategies.hogwild import HogwildStrategy
from lightning_dist.strategies.mesh import MeshStrategy
from lightning_dist.strategies.parameter_server import ParameterServerStrategy
from lightning_dist.strategies.pipeline import PipelineStrategy
from lightning_dist.strategies.tensor_parallel import TensorParallelStrategy

__all__ = [
    "AutoStrategy",
    "DDPStrategy",
    "FSDPStrategy",
    "HogwildStrategy",
    "MeshStrategy",
    "OuterOptimizer",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "TensorParallelStrategy",
    "plan",
]

register_strategies()
