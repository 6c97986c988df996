"""Numbers in trial runs of a whole module and of its parts, so that the results can be compared.

*Random numbers.* A part draws for its own features, and so other numbers than the whole. So a draw
of floats gives one constant, and each run draws its other numbers (a permutation, say) from the
same seeds, one for each draw. What a module does in training can then be compared, too.

*Digits.* Trials run in float64, in which the order of sums changes the last digits only. A module
may cast to fewer digits in between (a softmax in float32), or know one type only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from typing_extensions import override

from lightning_dist.engine.tensors.rng import python_state_kept, seed_python, seeded

TYPES = (torch.float64, torch.float32)
"""The types in which modules are tried, one after the other."""
_EXACT, _ROUNDED = 1e-9, 1e-4  # of the largest element: in float64, and with fewer digits
_DRAWN = 0.5  # lies in all usual ranges
_DRAWS = frozenset(
    {"bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal"}
    | {"rand", "rand_like", "randn", "randn_like", "uniform"}
)


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
        seed_python(0)
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
    numbers = seeded(0, device=torch.device("cpu"))
    with modes, precision, python_state_kept(), numbers, torch.no_grad():
        seed_python(0)
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
