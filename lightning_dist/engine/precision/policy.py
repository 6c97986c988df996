"""Chooses the modules of a model that compute in 16 bits.

The scheme is that of the classic papers (Micikevicius et al., ICLR 2018; Kalamkar et al., 2019, for
bf16). The optimizer keeps *masters*, the fp32 parameters that the user made. Forward and backward
run on half-precision *copies* of the masters. Gradients become fp32 before they are accumulated.
Some modules are *kept*: a norm divides by a deviation for which 11 bits are too few. So a kept
module's parameters stay fp32, and so do its computations.

The decision is made by module: a layer with a half-precision weight and an fp32 bias could not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lightning_dist.engine.common.names import shorten
from lightning_dist.engine.tensors.module_tree import original_class

_LOSS = "loss"


@dataclass(frozen=True, slots=True)
class HalfPrecision:
    """The rule by which modules compute in half precision.

    Attributes:
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        keep_fp32: Parts of the names of module classes, or of dotted names of parameters; upper and
            lower case are the same. ``"loss"`` also keeps the computations on a model's output.
        master_weights: Whether parameters stay fp32 and modules compute with half-precision copies;
            else the parameters themselves are in half precision.
    """

    dtype: torch.dtype
    keep_fp32: tuple[str, ...] = ("norm", _LOSS)
    master_weights: bool = True

    @property
    def keeps_loss(self) -> bool:
        """Whether the model's output is cast to fp32."""
        return any(_LOSS in part.lower() for part in self.keep_fp32)

    def is_loss(self, name: str, module: nn.Module) -> bool:
        """Returns whether a kept module is a loss, whose value must not be rounded."""
        return self.keeps_loss and _LOSS in f"{name} {original_class(module).__name__}".lower()

    def kept(self, root: nn.Module) -> dict[str, nn.Module]:
        """Returns the outermost modules that compute in fp32, by their dotted names.

        A module is matched only if it has parameters of its own or no children: a class such as
        ``NormalizingFlow`` is a model and no norm.

        The root's own class is not matched.
        """
        found: dict[str, nn.Module] = {}
        for name, module in root.named_modules():
            is_inside = any(name.startswith(f"{other}.") for other in found)
            if name and not is_inside and self._is_kept(name, module):
                found[name] = module
        return found

    def _is_kept(self, name: str, module: nn.Module) -> bool:
        own = [attribute for attribute, _ in module.named_parameters(recurse=False)]
        if not own and next(module.children(), None) is not None:
            return False
        texts = [original_class(module).__name__, *(f"{name}.{attribute}" for attribute in own)]
        return any(part.lower() in text.lower() for part in self.keep_fp32 for text in texts)

    def half_parameters(self, root: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters that compute in half precision, by their dotted names.

        The root's own parameters are left out: a step uses them with the model's output.

        Raises:
            ValueError: A parameter is neither fp32 nor converted by this rule already.
        """
        kept = {id(p) for module in self.kept(root).values() for p in module.parameters()}
        kept |= {id(p) for p in root.parameters(recurse=False)}
        floating = {n: p for n, p in root.named_parameters() if p.is_floating_point()}
        half = {name: p for name, p in floating.items() if id(p) not in kept}
        others = [
            f"{name!r} is {p.dtype}"
            for name, p in floating.items()
            if p.dtype != torch.float32
            and (self.master_weights or name not in half or p.dtype != self.dtype)
        ]
        if others:
            raise ValueError(
                "MixedPrecision makes its copies from parameters in torch.float32, and there are"
                f" others: {shorten(others)}. Call `.float()` on the module first."
            )
        return half

    def convert(self, root: nn.Module) -> None:
        """Casts the parameters themselves to half precision, unless ``master_weights``.

        Raises:
            ValueError: A parameter is of another dtype, or a module has been scripted.
        """
        scripted = [n for n, m in root.named_modules() if isinstance(m, torch.jit.ScriptModule)]
        if scripted:
            raise ValueError(
                f"MixedPrecision cannot cast what enters a scripted module: {shorten(scripted)}."
                " Use the module as it was before `torch.jit.script`."
            )
        for parameter in self.half_parameters(root).values():
            if not self.master_weights:
                parameter.data = parameter.data.to(self.dtype)

    def dtype_into(self, root: nn.Module, path: str) -> torch.dtype:
        """Returns the dtype of the input of a module below the user's, by its dotted path."""
        entries = [name for name, _ in self.entries(root)]
        is_half = any(_is_in(path, entry) for entry in entries)
        is_kept = any(_is_in(path, name) for name in self.kept(root))
        return self.dtype if is_half and not is_kept else torch.float32

    def entries(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Yields names and modules: the outermost that a step calls and that compute in half."""
        kept = self.kept(root)
        for name, module in _called(root):
            inside = {n for n, m in module.named_modules(prefix=name) if _has_floats(m)}
            outside = [n for n in inside if not any(_is_in(n, k) for k in kept)]
            if outside:
                yield name, module


def _called(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    for key, child in root.named_children():
        name = f"{prefix}{key}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # has no forward
            yield from _called(child, f"{name}.")
        else:
            yield name, child


def _is_in(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _has_floats(module: nn.Module) -> bool:
    return any(p.is_floating_point() for p in module.parameters(recurse=False))
