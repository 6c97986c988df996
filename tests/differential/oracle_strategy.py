"""One device that trains as an asynchronous pipeline must: with weights of a certain age.

Batch b meets version max(drained, b - staleness) of each parameter, in its forward and its
backward, and its gradient makes version b + 1 of the newest one. Lightning's loops, callbacks,
loggers and schedulers run on it as on any single device. Nothing of the pipeline is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.engine.planning.partition import uniform_partition
from tests.differential.case import Case
from tests.differential.dials.models import MODELS
from tests.differential.dials.strategies import STRATEGIES


def staleness_of(case: Case, versions: str) -> Callable[[str], int]:
    """Says how many updates old a parameter is that a batch meets, by the parameter's name.

    Args:
        case: Names the model and the strategy.
        versions: ``"stash"``, ``"vertical_sync"`` or ``"2bw"``.
    """
    last = STRATEGIES[case.strategy].stages - 1
    if versions != "stash":
        return lambda name: 1 if versions == "2bw" else last
    with torch.random.fork_rng():  # a trainer made anew draws none of the run's numbers
        num_layers = len(MODELS[case.model][0]())
    counts = uniform_partition(num_layers, last + 1)
    stages = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return lambda name: last - stages[int(name.split(".")[1])]


class OracleStrategy(SingleDeviceStrategy):
    """Gives each batch the weights of its versions.

    Args:
        staleness: Updates that a batch does not know, by the parameter's name.
        lag: Batches that the first stage may be ahead of what the last one knows.
        device: The one device.
    """

    def __init__(self, staleness: Callable[[str], int], lag: int, device: torch.device) -> None:
        super().__init__(device=device)
        self._staleness = staleness
        self._lag = lag
        self._forget()

    def _forget(self) -> None:
        self._versions: list[dict[str, Tensor]] = []
        self._drained = 0
        self._newest: dict[str, Tensor] = {}

    def drain(self) -> None:
        """Lets the next batch meet the newest weights."""
        self._drained = len(self._versions)

    @property
    def num_held_back(self) -> int:
        """Batches whose losses a stage does not know yet."""
        return min(self._lag, len(self._versions) - self._drained)

    def setup(self, trainer: L.Trainer) -> None:
        self._forget()
        super().setup(trainer)

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self.lightning_module is not None
        return dict(self.lightning_module.named_parameters())

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self._parameters()
        batch = len(self._versions)
        self._newest = {name: p.data for name, p in parameters.items()}
        self._versions.append({name: p.detach().clone() for name, p in parameters.items()})
        for name, parameter in parameters.items():
            version = max(self._drained, batch - self._staleness(name))
            parameter.data = self._versions[version][name].clone()
        return super().training_step(*args, **kwargs)

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        for name, parameter in self._parameters().items():
            parameter.data = self._newest[name]
        return loss

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self.drain()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._forget()
        super().load_model_state_dict(checkpoint, strict)


class CatchUp(L.Callback):
    """Drains where an asynchronous pipeline does, beside checkpoints.

    A scheduler that monitors a step's loss gets that of the newest batch that all stages know of.

    Args:
        strategy: What to drain.
    """

    def __init__(self, strategy: OracleStrategy) -> None:
        self._strategy = strategy
        self._losses: list[Any] = []
        self._known = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        loop = trainer.fit_loop.epoch_loop
        vars(loop).pop("_get_monitor_value", None)  # of an earlier fit
        self._losses, self._known = [], 0
        newest = loop._get_monitor_value

        def known(key: str) -> Any:
            if key != "train_loss":
                return newest(key)
            self._losses.append(newest(key))
            index = len(self._losses) - 1
            is_last = trainer.is_last_batch or trainer.global_step == trainer.max_steps
            held = 0 if is_last else self._strategy.num_held_back
            self._known = max(self._known, index - held)
            return self._losses[self._known]

        setattr(loop, "_get_monitor_value", known)  # noqa: B010

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._strategy.drain()
