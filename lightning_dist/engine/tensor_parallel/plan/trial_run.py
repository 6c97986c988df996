"""Trial runs of a copy of a module, without side effects, whose results can be compared.

*Random numbers.* A part of a module draws for its own features, and so other numbers than the
whole. So a draw of floats gives one constant, and each run draws its other numbers (a permutation,
say) from the same seeds, one for each draw. What a module does in training can then be compared,
too.

*Digits.* Trials run in float64, in which the order of sums changes the last digits only. A module
may cast to fewer digits in between (a softmax in float32), or know one type only.

*Arguments.* They are mostly an activation, and for a cross-attention a second one. Attentions also
take rotations of queries and keys, guessed by the argument's name. If the module can compute with a
guess, the guess is right, for wrong sizes raise an error. Masks are left out. For any other
argument None, a number and an activation are tried.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from typing_extensions import override

from lightning_dist.engine.tensor_parallel.layers.projection import input_size
from lightning_dist.engine.tensor_parallel.plan.heads import count_heads
from lightning_dist.engine.tensor_parallel.plan.regions import Styles, attentions
from lightning_dist.engine.tensors.forward_ast import attributes_computed_with
from lightning_dist.engine.tensors.patch import hooks_of
from lightning_dist.engine.tensors.rng import random_state_kept, seed_all
from lightning_dist.engine.tensors.tree import map_tensors, tensors_in

TYPES = (torch.float64, torch.float32)
"""The types in which modules are tried, one after the other."""
_CPU = torch.device("cpu")
_EXACT, _ROUNDED = 1e-9, 1e-4  # of the largest element: in float64, and with fewer digits
_DRAWN = 0.5  # lies in all usual ranges
_DRAWS = frozenset(
    {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal"}
    | {"rand", "rand_like", "randn", "randn_like", "uniform"}
)
_SETTINGS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
_OF_ANY_MODULE = vars(nn.Module()).keys() - {"training"}
# Numbers of such names say where a block is, unless its forward decides with them.
_PLACES = ("layer", "idx", "index", "depth", "number")
_SAME = ("key", "value", "k", "v", "memory")  # a second activation, as of a cross-attention
_ROTATIONS = ("cos", "sin", "freq", "rot", "rope", "angle", "position_emb", "pos_emb")


class TrialNumbers(TorchDispatchMode):
    """The dispatch mode of one run; it sees all operations beneath a module.

    Attributes:
        is_exact: Whether nothing was computed with fewer digits than float64 has.
    """

    # Such as flex_attention: each is one operation, and stays usable.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_exact = True
        self._num_draws = 0

    @property
    def tolerance(self) -> float:
        """By how much results may differ, as a part of the largest element."""
        return _EXACT if self.is_exact else _ROUNDED

    @override
    def __enter__(self) -> TrialNumbers:
        seed_all(0, device=_CPU)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs an operation."""
        is_random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        if is_random:
            torch.default_generator.manual_seed(self._num_draws)
            self._num_draws += 1
        result = func(*args, **(kwargs or {}))
        if is_random and func.overloadpacket.__name__.rstrip("_") in _DRAWS:
            return result.fill_(_DRAWN)
        if func is torch.ops.aten._to_copy.default:
            self.is_exact &= not _loses_digits(args[0], result)
        return result


@contextmanager
def on_the_side() -> Iterator[None]:
    """Returns a context manager for trials on the CPU, with equal random numbers on all ranks.

    It keeps outer random states, and leaves outer modes: an autocast, or one that watches a step.
    """
    # Private, for torch has no public way to leave dispatch modes. One of selective checkpointing
    # would take a trial's results for those of the step.
    modes = _disable_current_modes()
    precision = torch.autocast("cpu", enabled=False)
    with modes, precision, random_state_kept(_CPU), torch.no_grad():
        seed_all(0, device=_CPU)
        yield


def tolerance_of(run: Callable[[TrialNumbers], Tensor], dtype: torch.dtype) -> float:
    """Returns by how much results of a run may differ, as a part of the largest element.

    Raises:
        ValueError: Equal runs differ from each other already.
    """
    numbers = TrialNumbers()
    numbers.is_exact = dtype is TYPES[0]
    first, second = run(numbers), run(TrialNumbers())
    if not torch.equal(first.nan_to_num(), second.nan_to_num()):
        raise ValueError("two equal runs give different results")
    return numbers.tolerance


def differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Returns whether two results differ by more than the order of sums explains."""
    if one.shape != other.shape:
        return True
    return not float((one - other).abs().max()) <= tolerance * float(other.abs().max())


def in_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with a type of as many digits; one of integers as it is."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _loses_digits(before: Tensor, after: Tensor) -> bool:
    kinds = (before.dtype, after.dtype)
    if not all(kind.is_floating_point or kind.is_complex for kind in kinds):
        return False
    return torch.finfo(after.dtype).eps > torch.finfo(before.dtype).eps


def kind_of(module: nn.Module) -> tuple[Any, ...]:
    """Returns a key that is equal for modules with the same computation and other weights."""
    parts = list(module.modules())
    settings = (setting for part in parts for setting in _settings(part))
    shapes = (tensor.shape for tensor in [*module.parameters(), *module.buffers()])
    return (*map(type, parts), str(module), *settings, *shapes)


def _settings(part: nn.Module) -> Iterator[tuple[str, Any]]:
    own = {name: value for name, value in vars(part).items() if name not in _OF_ANY_MODULE}
    places = {n for n, value in own.items() if type(value) is int and _is_place(n)}
    if places:
        places -= attributes_computed_with(part)
    return ((name, _setting(value)) for name, value in own.items() if name not in places)


def _setting(value: Any) -> Any:
    """Returns a key for a value that a forward may decide by; objects differ by identity."""
    if isinstance(value, nn.Module | Tensor):
        return None  # its class, shape and settings are other parts of the key
    if isinstance(value, Mapping):
        return tuple((key, _setting(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_setting, value))
    return value if isinstance(value, _SETTINGS) else id(value)


def _is_place(name: str) -> bool:
    return any(word in name for word in _PLACES)


def random_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a copy of a module with random values of a type on the CPU."""
    known: dict[int, Any] = {}
    for parameter in module.parameters():
        value = torch.empty(parameter.shape, dtype=dtype)
        reach = (3 / parameter.shape[-1]) ** 0.5 if parameter.dim() > 1 else 0.5
        value.uniform_(-reach, reach).add_(float(parameter.dim() < 2))
        known[id(parameter)] = nn.Parameter(value, requires_grad=False)
    for buffer in module.buffers():
        # The values on the meta device are unknown.
        value = torch.ones(buffer.shape, dtype=buffer.dtype) if buffer.is_meta else buffer.cpu()
        known[id(buffer)] = in_type(value, dtype).clone()
    copy = deepcopy(module, known)
    for part in copy.modules():  # hooks of the module must not see the copy's calls
        for hooks in hooks_of(part):
            hooks.clear()
    return copy


def shared_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of a module that shares its parameters."""
    return deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})


@dataclass(frozen=True)
class Trial:
    """A way to call a module with an activation."""

    x: Tensor
    fill_in: Callable[[Tensor], tuple[Sequence[Any], Mapping[str, Any]]]  # the call's arguments
    is_guess: bool = False  # the module may need other arguments

    def run(self, module: nn.Module, numbers: TrialNumbers, x: Tensor | None = None) -> Tensor:
        """Calls a module's forward, without hooks, and returns its first tensor."""
        args, kwargs = self.fill_in(self.x if x is None else x)
        with numbers:
            returned = module.forward(*args, **kwargs)
        found: Tensor = tensors_in(returned)[0]
        return found


def guess_trials(
    module: nn.Module, styles: Styles, activations: Iterable[Tensor], length: int
) -> Iterator[Trial]:
    """Lists ways to call a module, the likeliest first."""
    for x, (same, others, is_guess) in product(activations, _guesses(module, styles, length)):
        yield Trial(x, partial(_fill_in, same, others), is_guess)


def _fill_in(same: Sequence[str], others: dict[str, Any], x: Tensor) -> tuple[Any, dict[str, Any]]:
    given = map_tensors(lambda t: in_type(t, x.dtype).clone(), others)
    return (x,), dict.fromkeys(same, x) | given


def _guesses(
    module: nn.Module, styles: Styles, length: int
) -> Iterator[tuple[Sequence[str], dict[str, Any], bool]]:
    """Lists arguments after the first that get the activation, too, other ones, and `is_guess`."""
    _, *parameters = inspect.signature(module.forward).parameters.values()
    wanted = [p for p in parameters if p.default is p.empty and _has_name(p)]
    activations = tuple(p.name for p in wanted if p.name in _SAME)
    unknown = [p for p in wanted if p.name not in _SAME]
    if not unknown:
        yield activations, {}, False
    asked = [p.name for p in parameters if _has_name(p) and p.default in (p.empty, None)]
    rotated = [name for name in asked if any(word in name.lower() for word in _ROTATIONS)]
    nothing = {p.name: 0 if p.annotation in (int, "int") else None for p in unknown}
    head_size = _head_size(module, styles)
    if not rotated or head_size is None:
        if unknown:
            yield activations, nothing, True
            yield activations, dict.fromkeys(nothing, 2.0), True
            yield (*activations, *nothing), {}, True
        return
    for guess in _rotations(length, head_size):
        yield activations, nothing | {name: guess(name) for name in rotated}, True


def _head_size(module: nn.Module, styles: Styles) -> int | None:
    for parent in attentions(styles):
        sums = next(name for name, style in styles.items() if style.sums_up)
        features = input_size(module.get_submodule(sums))
        heads = count_heads(module.get_submodule(parent), features)
        if heads is not None:
            return features // heads
    return None


def _has_name(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def _rotations(length: int, head_size: int) -> Iterator[Any]:
    """Lists functions from an argument's name to a rotation; some models rotate a part only."""
    for size in (head_size, head_size // 2, head_size // 4):
        half = torch.randn(length, size // 2)
        angles = torch.cat((half, half), -1)
        yield lambda _, angles=angles: (angles.cos()[None], angles.sin()[None])
        yield lambda _, half=half: torch.polar(torch.ones_like(half), half)
        yield lambda name, angles=angles: angles.sin() if "sin" in name else angles.cos()
