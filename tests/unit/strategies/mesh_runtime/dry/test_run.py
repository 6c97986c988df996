"""What a dry run makes of modules and batches; `tests/integration/mesh` has what it counts."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_dist import MeshStrategy
from lightning_dist.engine.parallelize.shard_config import ShardConfig

FLOAT = 4


class Chooses(L.LightningModule):
    """Its step looks at values."""

    def __init__(self, by_shape: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.by_shape = by_shape

    def training_step(self, batch: Tensor) -> Tensor:
        self.log("mean", batch.mean())
        if self.by_shape:
            batch = batch[batch > 0]
        out = self.layer(batch)
        return out.sum() if out.sum() > 0 else out.mean()


def test_a_module_stays_as_it_was_and_may_be_ordinary_or_meta() -> None:
    ordinary = Chooses(by_shape=False)
    before = {name: value.clone() for name, value in ordinary.state_dict().items()}
    state = torch.random.get_rng_state()
    with torch.device("meta"):
        meta = Chooses(by_shape=False)
    strategy = MeshStrategy(dp_shard=2)
    said = [strategy.dry_run(m, 2, sample_batch=torch.ones(2, 4)) for m in (ordinary, meta)]
    assert said[0] == said[1]
    assert said[0].kinds[0].parameter_bytes == 10 * FLOAT
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, value in ordinary.named_parameters():
        assert type(value) is nn.Parameter
        assert torch.equal(value, before[name])
        assert value.grad is None
    assert not dist.is_initialized()


def test_frozen_parameters_have_neither_gradients_nor_states() -> None:
    module = Chooses(by_shape=False)
    module.layer.bias.requires_grad_(False)
    strategy = MeshStrategy(dp_shard=2)
    options = {"sample_batch": torch.ones(2, 4), "optimizer_states_per_parameter": 1}
    (kind,) = strategy.dry_run(module, 2, **options).kinds
    sizes = (kind.parameter_bytes, kind.gradient_bytes, kind.optimizer_state_bytes)
    assert sizes == (10 * FLOAT, 8 * FLOAT, 8 * FLOAT)


class ScalesLate(L.LightningModule):
    """Builds a tensor in ``configure_model`` that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def configure_model(self) -> None:
        self.scale = torch.arange(4.0)

    def training_step(self, batch: Tensor) -> Tensor:
        return (self.model(batch) * self.scale).sum()


@pytest.mark.parametrize("pp", [1, 2])
def test_tensors_that_are_no_parameters_have_no_values_either(pp: int) -> None:
    said = MeshStrategy(pp=pp).dry_run(ScalesLate(), 2, sample_batch=torch.ones(2, 4))
    assert [stage for kind in said.kinds for stage in kind.stages] == [*range(pp)]


@pytest.mark.parametrize("pp", [1, 2])
def test_a_step_without_a_loss_is_an_error(pp: int) -> None:
    class Skips(ScalesLate):
        def training_step(self, batch: Tensor) -> None:  # type: ignore[override]
            self.model(batch)

    with pytest.raises(ValueError, match="must return its loss.*in a pipeline or a dry run"):
        MeshStrategy(pp=pp).dry_run(Skips(), 2, sample_batch=torch.ones(2, 4))


class TiedWords(L.LightningModule):
    """Two stages, whose layers share one weight of 6 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
        self.model[1].weight = self.model[0].weight

    def training_step(self, batch: Tensor) -> Tensor:
        return self.model(batch).mean()


@pytest.mark.parametrize("dp_shard", [1, 2])
def test_stages_that_share_a_weight_send_its_gradient(dp_shard: int) -> None:
    strategy = MeshStrategy(pp=2, dp_shard=dp_shard)
    words = torch.zeros(2, 3, dtype=torch.int64)
    said = strategy.dry_run(TiedWords(), 2 * dp_shard, sample_batch=words)
    held = 6 * 4 * FLOAT // dp_shard  # what a rank has of the weight
    activation = 2 * 3 * 4 * FLOAT
    for rank in (0, dp_shard):  # the later stage sends its own, the first one the sum
        kind = said.kind_of(rank)
        assert kind.parameter_bytes == kind.gradient_bytes == held
        (sent,) = [t for t in kind.traffic if t.axes == ("pp",)]
        # As many activations go one way as gradients go the other.
        assert sent.num_bytes == activation + held


def test_precision_is_the_plugins() -> None:
    plugin = MixedPrecision("bf16-mixed", "cpu")
    gathered = []
    for strategy in (MeshStrategy(dp_shard=2), MeshStrategy(dp_shard=2, precision_plugin=plugin)):
        said = strategy.dry_run(Chooses(by_shape=False), 2, sample_batch=torch.ones(2, 4))
        gathered.append(said.kinds[0].traffic[0].num_bytes)
    assert gathered == [20 * FLOAT, 20 * FLOAT // 2]


def test_a_step_that_asks_for_its_trainer_is_told_why_there_is_none() -> None:
    module = Chooses(by_shape=False)
    module.training_step = lambda batch: module.trainer.max_steps  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        MeshStrategy(dp_shard=2).dry_run(module, 2, sample_batch=torch.ones(2, 4))
    assert any("dry run" in note for note in caught.value.__notes__)


def test_a_shape_that_depends_on_values_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on the values"):
        MeshStrategy(dp_shard=2).dry_run(Chooses(by_shape=True), 2, sample_batch=torch.ones(2, 4))


@pytest.mark.parametrize(
    ("options", "world_size", "words"),
    [
        ({"dp_shard": 4}, 6, "multiply to the world size of 6"),
        ({"shard": ShardConfig(wrap="manual")}, 2, "wrap='manual'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], world_size: int, words: str) -> None:
    strategy = MeshStrategy(**options)
    with pytest.raises(ValueError, match=words):
        strategy.dry_run(Chooses(by_shape=False), world_size, sample_batch=torch.ones(2, 4))


def test_fewer_than_no_optimizer_states_are_refused() -> None:
    options: dict[str, Any] = {"sample_batch": torch.ones(2, 4)}
    with pytest.raises(ValueError, match="optimizer_states_per_parameter=-1"):
        MeshStrategy().dry_run(
            Chooses(by_shape=False), 2, optimizer_states_per_parameter=-1, **options
        )
