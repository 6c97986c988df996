"""Models of different build, for what selects modules; none of them ever runs."""

from __future__ import annotations

from hypothesis import strategies as st
from torch import nn

from lightning_dist.engine.sharding.wrap import WrapPolicy


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self) -> None: ...


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )

    def forward(self) -> None: ...


class WideBlock(Block):
    pass


class Decoder(nn.Module):
    """Like a HuggingFace model: the blocks in a list; dropout has no parameters."""

    def __init__(self, depth: int = 3, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.RMSNorm(width)

    def forward(self) -> None: ...


class LanguageModel(nn.Module):
    def __init__(self, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.model = Decoder(depth)
        self.head = nn.Linear(4, 16, bias=False)
        if tied:
            self.head.weight = self.model.embed.weight

    def forward(self) -> None: ...


class Residual(nn.Module):
    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.shortcut = nn.Sequential(nn.Conv2d(channels, channels, 1)) if shortcut else None

    def forward(self) -> None: ...


class ConvNet(nn.Module):
    """Like torchvision's ResNet: stages as attributes; the last one has a single block."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2, 3)
        self.stage1 = nn.Sequential(Residual(2, False), Residual(2, False))
        self.stage2 = nn.Sequential(Residual(4, True), Residual(4, False))
        self.stage3 = nn.Sequential(Residual(8, True))
        self.fc = nn.Linear(8, 3)

    def forward(self) -> None: ...


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self) -> None: ...


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self) -> None: ...


class Pair(nn.Module):
    """Two modules as attributes, and a weight of its own."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(2, 1).weight.detach()))

    def forward(self) -> None: ...


linears = st.builds(nn.Linear, st.integers(1, 4), st.integers(1, 4), bias=st.booleans())
modules = st.recursive(
    linears,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4).map(lambda parts: nn.Sequential(*parts))
        | st.lists(inner, min_size=1, max_size=4).map(nn.ModuleList)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=10,
)


@st.composite
def shared_modules(draw: st.DrawFn) -> nn.Module:
    """Any tree in which a layer may stand twice, and a weight may belong to two layers."""
    root = nn.Sequential(draw(modules), draw(modules))
    layers = [part for part in root.modules() if isinstance(part, nn.Linear)]
    pick = st.sampled_from(layers)
    if draw(st.booleans()):
        root.append(draw(pick))
    if draw(st.booleans()):
        draw(pick).weight = draw(pick).weight
    return root


def names(policy: WrapPolicy, module: nn.Module) -> list[str]:
    """Lists the units that a policy selects."""
    return [unit.name for unit in policy.select(module)]
