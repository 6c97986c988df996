"""Predicted weights: an estimate of the weights to which a batch's update will be added.

Without new gradients an optimizer with momentum goes on in its direction (SpecTrain: Chen et al.
2018, section 3.2; XPipe: Guan et al. 2019, section 4). Weight decay is left out. The micro-batches
of a batch share the predicted copies, in forwards and backwards alike. The number of updates to
predict over is counted: those of batches that have begun and are not applied yet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, NAdam, Optimizer, RAdam
from typing_extensions import override

from lightning_dist.engine.stashing.versions import ComputeWeights, WeightPolicy, WeightVersion

_ADAMS = (Adam, NAdam, RAdam)  # AdamW is an Adam


def check_extrapolation(optimizer: Optimizer) -> None:
    """Checks that an optimizer's next updates can be predicted.

    Raises:
        ValueError: The updates cannot be predicted.
    """
    has_momentum = isinstance(optimizer, SGD) and all(g["momentum"] for g in optimizer.param_groups)
    if not has_momentum and not isinstance(optimizer, _ADAMS):
        raise ValueError(
            f"staleness_correction='predict' does not know where {type(optimizer).__name__} goes:"
            " it takes SGD with momentum, Adam, AdamW, NAdam and RAdam. Use one of"
            " these, or another `staleness_correction`."
        )


@torch.no_grad()
def extrapolated(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], num_updates: int
) -> dict[str, Tensor]:
    """Returns copies of parameters, extrapolated over some updates.

    ==================  ==================================================================
    optimizer           after ``s`` more updates
    ==================  ==================================================================
    SGD with momentum   ``W - lr * (g - g ** (s + 1)) / (1 - g) * buffer``, ``g`` the momentum;
                        ``g`` times that way where it is Nesterov's
    Adam and its like   ``W - lr * s * m / (sqrt(v) + eps)``, ``m`` and ``v`` without bias
    ==================  ==================================================================
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is not None:
                state = optimizer.state.get(parameter, {})
                found[name] = parameter.detach().clone()
                if isinstance(optimizer, SGD):
                    _coast(found[name], group, state, num_updates)
                else:
                    _go_on(found[name], group, state, num_updates)
    return found


def _coast(
    weight: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], num_updates: int
) -> None:
    """Moves a weight as SGD does without new gradients."""
    buffer, momentum = state.get("momentum_buffer"), group["momentum"]
    if buffer is not None:
        way = sum(momentum**i for i in range(1, num_updates + 1))
        way *= momentum if group["nesterov"] else 1.0
        weight.add_(buffer, alpha=-float(group["lr"]) * way)


def _go_on(
    weight: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], num_updates: int
) -> None:
    """Moves a weight as Adam does when gradients stay at their average."""
    if "exp_avg" not in state:
        return
    beta1, beta2 = group["betas"]
    step = float(state["step"])
    variance = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    spread = variance.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    rate = float(group["lr"]) * num_updates / (1 - beta1**step)
    weight.addcdiv_(state["exp_avg"], spread, value=-rate)


class Predicted(WeightPolicy):
    """Policy under which a forward sees weights predicted for the time of its update.

    ``predict`` returns copies of the trainable parameters as they will be some updates later. The
    ``batch_size`` micro-batches of an update see the same weights.
    """

    def __init__(
        self,
        weights: ComputeWeights,
        predict: Callable[[int], Mapping[str, Tensor]],
        batch_size: int = 1,
    ) -> None:
        super().__init__(weights)
        self._predict = predict
        self._batch_size = batch_size
        self._num_acquired = 0
        self._steps_before_restart = 0
        self._newest: WeightVersion | None = None
        self._copied_bytes: dict[WeightVersion, int] = {}

    @override
    def acquire(self) -> WeightVersion:
        """Returns weights predicted over the pending updates before the batch's own."""
        batch, place = divmod(self._num_acquired, self._batch_size)
        if place == 0:
            self._newest = self._version(batch - (self.num_steps - self._steps_before_restart))
        self._num_acquired += 1
        assert self._newest is not None
        self._newest.num_users += 1
        return self._newest

    def _version(self, num_updates: int) -> WeightVersion:
        copies = self._predict(num_updates) if num_updates else {}
        aliases = self._aliases(copies)
        version = WeightVersion(self.num_steps, aliases)
        self._copied_bytes[version] = sum(aliases[name].nbytes for name in copies)
        self.peak_stash_bytes = max(self.peak_stash_bytes, self.stash_bytes)
        return version

    def _aliases(self, copies: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return {
            name: copies.get(name, p.data)
            .to(self._weights.dtype_of(p))
            .detach()
            .requires_grad_(p.requires_grad)
            for name, p in self._weights.parameters.items()
        }

    @override
    def release(self, version: WeightVersion) -> None:
        version.num_users -= 1
        has_more = version is self._newest and self._num_acquired % self._batch_size > 0
        if not version.num_users and not has_more:
            del self._copied_bytes[version]
            self._newest = None if version is self._newest else self._newest

    @override
    @torch.no_grad()
    def protect_versions(self) -> None:
        """Moves the parameters away from the versions that no update was predicted for."""
        shared = [version for version, count in self._copied_bytes.items() if count == 0]
        for parameter in self._weights.parameters.values() if shared else ():
            if parameter.requires_grad:
                parameter.data = parameter.data.clone()
        self._copied_bytes |= dict.fromkeys(shared, self.version_bytes)

    @override
    def restart(self) -> None:
        """Restarts the count: no other update comes before the next batch's own."""
        super().restart()
        self._num_acquired, self._steps_before_restart = 0, self.num_steps

    @property
    @override
    def version_bytes(self) -> int:
        return self._weights.num_bytes()

    @property
    @override
    def stash_bytes(self) -> int:
        return sum(self._copied_bytes.values())
