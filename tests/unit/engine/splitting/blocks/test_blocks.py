"""Models that keep their own forward, on four stages of two ranks, and on one device."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_dist.engine.splitting.blocks.find_blocks import blocks_of
from lightning_dist.engine.splitting.config import PipelineConfig
from lightning_dist.engine.splitting.cut import cut
from tests.helpers.block_parity import largest_difference

LAYERS = "model.body.blocks"


class Block(nn.Module):
    kind = "plain"

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, hidden: Tensor, *, scale: Tensor) -> Tensor:
        self.num_calls += 1
        return hidden + scale * torch.tanh(self.linear(self.norm(hidden)))


class Parts(nn.Module):
    """A transformer's; what comes last is registered first."""

    def __init__(self, block: type[nn.Module] = Block, count: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.embed = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(block() for _ in range(count))


class Body(Parts):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(tokens) * 2.0
        factor = torch.full(hidden.shape[:1], scale, dtype=hidden.dtype)[:, None]
        for block in self.blocks[: len(self.blocks)]:
            assert block.kind == "plain"
            hidden = block(hidden, scale=factor)
        return self.norm(hidden)


class Model(nn.Module):
    def __init__(self, body: type[Parts] = Body, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(4, 3)
        self.body = body(**options)
        self.double()

    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return self.head(self.body(tokens, **options))


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    tokens, wanted = batch
    return F.cross_entropy(model(tokens, scale=0.5), wanted)


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    numbers = torch.randint(7, (3, 2, 6), generator=generator)
    return [(tokens, wanted % 3) for tokens, wanted in numbers]


def difference(model: nn.Module, schedule: str = "zbv") -> float:
    return largest_difference(model, batches(), loss_of, PipelineConfig(schedule, 2, LAYERS))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zbv", "interleaved_1f1b"])
def test_learns_what_it_learns_alone(schedule: str) -> None:
    assert difference(Model(), schedule) < 1e-13


class PairBlock(Block):
    """Hands a second value on, through which gradients flow, too."""

    def forward(self, hidden: Any, *, scale: Tensor) -> Any:
        hidden, memory = hidden if isinstance(hidden, tuple) else (hidden, None)
        hidden = super().forward(hidden if memory is None else hidden + memory, scale=scale)
        return hidden, (hidden * 0.1 if memory is None else memory)


class PairBody(Body):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden: Any = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=torch.tensor(scale))
        return self.norm(hidden[0])


def test_whatever_a_block_returns_travels() -> None:
    assert difference(Model(PairBody, block=PairBlock)) < 1e-13


class Asking(Body):
    """Asks parts of it that may live elsewhere for all but their values."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        weight = self.embed.weight
        assert weight.shape == (7, 4)
        assert weight.requires_grad
        hidden = super().forward(tokens.to(weight.device), scale).to(weight.dtype)
        inner = self.blocks[0].linear.weight
        return hidden.type_as(inner) + inner.new_zeros(self.embed.embedding_dim)


def test_a_layer_elsewhere_says_what_it_is() -> None:
    assert difference(Model(Asking), "1f1b") < 1e-13


@pytest.mark.parametrize("trainable", [("head",), ("body.blocks.2",), ("body.embed", "body.norm")])
def test_parts_may_be_frozen(trainable: tuple[str, ...]) -> None:
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trainable))
    assert difference(model) < 1e-13


class Leaking(Body):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = start = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=start[..., :1])
        return self.norm(hidden)


class Masking(Body):
    """Gives its blocks what a comparison has made of the embedding."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(tokens)
        mask = (hidden.sum(-1, keepdim=True) > 0.0).double()
        for block in self.blocks:
            hidden = block(hidden, scale=mask)
        return self.norm(hidden)


class Counting(nn.Embedding):
    """Returns integers with the embedding."""

    def forward(self, tokens: Tensor) -> Any:
        return super().forward(tokens), (tokens > 2).long().sum(0)


class Counted(Body):
    """Uses integers from before the blocks behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Counting(7, 4)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden, counts = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=torch.tensor(scale))
        return self.norm(hidden) * (1 + counts)


class Deciding(Body):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(tokens)
        scale = 2.0 if (hidden.abs() > 0.0).any() else 1.0
        for block in self.blocks:
            hidden = block(hidden, scale=torch.tensor(scale))
        return self.norm(hidden)


class Shaping(Body):
    """Takes the shape of what comes from before the blocks, not its values."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = start = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=torch.full_like(start, scale)[..., :1])
        return self.norm(hidden) + start.new_ones(4)


def test_a_shape_from_before_the_blocks_may_be_used() -> None:
    assert difference(Model(Shaping)) < 1e-13


class Reversed(Body):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(tokens)
        for block in reversed(list(self.blocks)):
            hidden = block(hidden, scale=torch.tensor(scale))
        return self.norm(hidden)


class Dropping(Body):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks[:-1]:
            hidden = block(hidden, scale=torch.tensor(scale))
        return self.norm(hidden)


class Reading(Body):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(tokens) * self.embed.weight.sum()


class Watching(Body):
    """Reads what its blocks count while they run."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = super().forward(tokens, scale)
        return hidden * sum(block.num_calls for block in self.blocks)


class Unsaid(Parts):
    """Its forward does not mention what runs behind the blocks."""

    def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, scale=torch.tensor(scale))
        return getattr(self, "norm")(hidden)  # noqa: B009


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        (
            Leaking,
            ValueError,
            r"^Let PipelineStrategy .* Block \d of 'body.blocks' .*\['scale'\].*'body.embed'",
        ),
        (Masking, ValueError, r"^Let PipelineStrategy .* Block \d .*\['scale'\].*'body.embed'"),
        (Counted, ValueError, r"^Let PipelineStrategy trace .* Model uses a value from before"),
        (Deciding, ValueError, r"^Let PipelineStrategy trace .* Model reads a number"),
        (Reversed, ValueError, r"called block 4 when block 0 of 'body.blocks'"),
        (Dropping, ValueError, r"ended when block 4 .*layerdrop"),
        (Reading, ValueError, r"'weight' of layer 'body.embed' .*lives on stage 0.*'trace'"),
        (Watching, ValueError, r"'num_calls' of layer 'body.blocks.0' .*stage 0.*return the value"),
        (Unsaid, ValueError, r"'body.norm' was taken to run before the blocks .*pp_plan"),
    ],
)
def test_what_cannot_be_cut_is_refused(
    body: type[Parts], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        difference(Model(body), "1f1b")


def test_a_plan_says_what_the_code_does_not() -> None:
    model = Model(Unsaid)
    model.pp_plan = {
        "body.embed": (["tokens"], ["hidden"]),
        "body.blocks": (["hidden"], ["hidden"]),
        "body.norm": (["hidden"], ["hidden"]),
    }
    assert difference(model) < 1e-13


def test_a_plan_that_is_wrong_is_found_out() -> None:
    model = Model()
    model.pp_plan = {"body.blocks": (["x"], ["x"]), "body.embed": (["x"], ["x"])}
    with pytest.raises(ValueError, match=r"'body.embed' was taken to run behind the blocks"):
        difference(model, "1f1b")


def test_a_value_past_the_blocks_is_never_a_wrong_number() -> None:
    class Skipping(Body):
        def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(tokens, scale) + self.embed(tokens).detach()

    with pytest.raises(ValueError, match=r"'body.embed' was taken to run before"):
        difference(Model(Skipping), "1f1b")

    class Around(Body):
        def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
            hidden = start = self.embed(tokens)
            for block in self.blocks:
                hidden = block(hidden, scale=torch.tensor(scale))
            return self.norm(hidden) + start

    with pytest.raises(ValueError, match=r"^Let PipelineStrategy trace .* Model uses a value"):
        difference(Model(Around), "1f1b")


class Collecting(Body):
    """Collects what its blocks return, by their hooks, as models of transformers do."""

    def forward(
        self, tokens: Tensor, scale: float = 1.0, output_hidden_states: bool = False
    ) -> Tensor:
        found: list[Tensor] = []
        hooks = [
            block.register_forward_hook(lambda _, __, output: found.append(output))
            for block in self.blocks._modules.values()
            if isinstance(block, Block)
        ]
        last = super().forward(tokens, scale)
        for hook in hooks:
            hook.remove()
        return torch.stack(found).mean(dim=0) if output_hidden_states else last


class OfAllLayers(Model):
    def forward(self, tokens: Tensor, **options: Any) -> Tensor:
        return self.head(self.body(tokens, **options, output_hidden_states=self.asks))

    asks = True


def test_a_call_inside_of_the_model_asks_for_no_outputs_of_all_layers() -> None:
    model = OfAllLayers(Collecting)
    with pytest.raises(ValueError, match="output_hidden_states=True asks Collecting for something"):
        difference(model, "1f1b")
    model = OfAllLayers(Collecting)
    model.asks = False
    assert difference(model, "1f1b") < 1e-13


def test_a_nan_of_the_models_own_stays_one() -> None:
    class Broken(Body):
        def forward(self, tokens: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(tokens, scale) * torch.nan

    assert math.isnan(difference(Model(Broken), "1f1b"))


def test_the_model_is_left_as_it_was() -> None:
    model = Model()
    names = list(model.state_dict())
    blocks = model.body.blocks
    layers = blocks_of(model, "body.blocks", "model")
    layers.attach(torch.device("cpu"))
    assert model.body.blocks is not blocks
    assert list(model.state_dict()) == names
    layers.detach()
    assert model.body.blocks is blocks
    assert not model.body._forward_pre_hooks
    cut(layers, [2, 3], [0])
    layers.attach(torch.device("cpu"))
    assert "forward" in model.head.__dict__
    layers.detach()
    assert "forward" not in model.head.__dict__


def test_a_stage_holds_its_own_parameters_by_their_names() -> None:
    model = Model(count=3)
    layers = blocks_of(model, "body.blocks", "model")
    parameters = dict(model.named_parameters())
    cut(layers, [1, 2], [0, 1])
    first, last = layers.stage(0, 1), layers.stage(1, 3)
    assert {n.rpartition(".")[0] for n, _ in first.named_parameters()} == {
        "body.embed",
        "body.blocks.0.norm",
        "body.blocks.0.linear",
    }
    assert {"body.norm.weight", "head.weight"} <= dict(last.named_parameters()).keys()
    own = {**dict(first.named_parameters()), **dict(last.named_parameters())}
    assert {n: id(p) for n, p in own.items()} == {n: id(p) for n, p in parameters.items()}


def test_a_remote_part_that_reads_values_is_named() -> None:
    class Looking(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens.clamp(max=7 + int(tokens[0])))

    model = Model()
    model.body.embed = Looking(7, 4).double()
    with pytest.raises(ValueError, match=r"trace .*'body.embed' lives on"):
        difference(model, "1f1b")


class CountedEmbedding(nn.Embedding):  # the shapes that are computed without values
    computed: ClassVar[list[tuple[int, ...]]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.is_meta:
            self.computed.append(tuple(tokens.shape))
        return super().forward(tokens)


def test_shapes_of_a_remote_embedding_are_computed_where_they_change() -> None:
    model = Model()
    model.body.embed = CountedEmbedding(7, 4).double()
    CountedEmbedding.computed.clear()
    first, second = batches()[:2]
    short = tuple(part[..., :2] for part in first)
    order = [first, second, short, first]
    config = PipelineConfig("zbv", 2, LAYERS)
    assert largest_difference(model, order, loss_of, config) < 1e-12
    assert CountedEmbedding.computed == [(3,), (1,), (3,)]
