"""Runs a model's own forward on a stage, with blocks that live on other stages.

The forward loops over a list of wrapped blocks. :class:`BlockRoute` intercepts each call outside of
all hooks of the block. Blocks before the stage's own return placeholders, and the last of these
returns the received activation. After the last own block the forward ends, except on the last
stage, where norm, head and loss follow.

An embedding that is remote returns NaNs of the shapes that its structure on the meta device
computes. If the model passes them around the blocks, they are detected in a block's arguments, or
in a result that is a number if placeholders are zeros. Else the loss is NaN, never a wrong number.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.cut import ForeignLayer
from lightning_dist.engine.tensors.module_tree import set_attribute
from lightning_dist.engine.tensors.tree import flatten, map_tensors

_INSTEAD = (
    "Let PipelineStrategy trace the model with layers='trace', or put an `nn.Sequential` of layers"
    " that hand on all they need into your module."
)


# No `Exception`, so that a model's `except Exception` does not stop it.
class _BlocksLeft(BaseException):  # noqa: N818
    """Ends the model's forward after a stage's last block."""


class Span(NamedTuple):
    """The blocks of a stage, from index ``first`` to before ``end``."""

    first: int
    end: int


@dataclass(slots=True)
class _Course:
    """One run of the forward."""

    span: Span
    received: Any  # the activation from the stage before
    fill: float = math.nan  # value of the placeholders' elements
    next_block: int = 0
    placeholder: Any = None  # for the output of a remote block
    output: Any = None


class BlockRoute:
    """Intercepts the calls between a model's forward and its blocks.

    Args:
        model: The model, cut or not.
        path: Dotted path of the model's list of blocks.
        before: Names of the other modules with parameters that run before the blocks.
        after: Names of the modules with parameters that run after the blocks.
        run: Calls a block of this stage with its arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        before: Collection[str],
        after: Collection[str],
        run: Callable[..., Any],
    ) -> None:
        self._model = model
        self._path = path
        self._before = before
        self._after = after
        self._run_block = run
        self._blocks = cast(nn.ModuleList, model.get_submodule(path))
        self._forward: Callable[..., Any] = model.forward
        self._course: _Course | None = None
        self._inspected: set[Span] = set()
        self._finished: set[Span] = set()
        self._latest: dict[str, Any] = {}  # results of remote modules, without values
        self._latest_keys: dict[str, bytes | None] = {}

    def attach(self) -> None:
        """Replaces the list of blocks of the cut model, and the forwards of remote modules."""
        self._forward = self._model.forward
        set_attribute(self._model, self._path, _GuardedBlocks(self._blocks, self._call))
        for name, module in self._remote_modules():
            stand_in = partial(self._stand_in, name, module, module.imitation())
            module.forward = stand_in  # type: ignore[method-assign]

    def detach(self) -> None:
        """Restores the list of blocks and the forwards."""
        set_attribute(self._model, self._path, self._blocks)
        for _, module in self._remote_modules():
            del module.forward

    def _remote_modules(self) -> list[tuple[str, ForeignLayer]]:
        parts = {name: self._model.get_submodule(name) for name in (*self._before, *self._after)}
        return [(name, part) for name, part in parts.items() if isinstance(part, ForeignLayer)]

    def run(
        self, span: Span, received: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Runs the model's forward, up to the stage's last block.

        Args:
            span: The stage's blocks.
            received: Output of the block before them, from its stage; ignored on the first stage.
            arguments: Positional arguments of the forward.
            keywords: Keyword arguments of the forward.

        Returns:
            The last own block's output; on the last stage the forward's result.

        Raises:
            ValueError: The forward does not call each block once and in order, or it uses a module
                or value of another stage.
        """
        result = self._run(_Course(span, received), arguments, keywords)
        is_last = span.end == len(self._blocks)
        if is_last and span.first > 0 and span not in self._finished:
            self._finished.add(span)
            if _has_nan(result) and not _has_nan(received):
                self._refuse_leak(_Course(span, received, fill=0.0), arguments, keywords)
        return result

    def _run(self, course: _Course, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self._course = course
        try:
            result = self._forward(*arguments, **keywords)
        except _BlocksLeft:
            return course.output
        finally:
            self._course = None
        if course.next_block < course.span.end:
            raise ValueError(self._out_of_order(course, "ended"))
        return result

    def _refuse_leak(
        self, course: _Course, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Raises an error if a result is NaN because of placeholders only."""
        with torch.no_grad(), torch.random.fork_rng(devices=()):
            if _has_nan(self._run(course, arguments, keywords)):
                return
        raise ValueError(
            f"{_INSTEAD} {type(self._model).__name__} uses a value from before the blocks of"
            f" {self._path!r} behind them, and only what a block returns travels between stages."
        )

    def _call(self, index: int, block: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        course = self._course
        if course is None:
            return block(*arguments, **keywords)
        if index != course.next_block:
            raise ValueError(self._out_of_order(course, f"called block {index}"))
        span = course.span
        course.next_block += 1
        if index < span.first:
            is_next_own = index + 1 == span.first
            if course.placeholder is None and not is_next_own:
                unknown = partial(_unknown, fill=course.fill)
                course.placeholder = map_tensors(unknown, course.received)
            return course.received if is_next_own else course.placeholder
        if index == span.first > 0 and span not in self._inspected:
            self._inspected.add(span)
            self._inspect(index, course.received, [*enumerate(arguments), *keywords.items()])
        output = self._run_block(block, *arguments, **keywords)
        if index + 1 == span.end < len(self._blocks):
            course.output = output
            raise _BlocksLeft
        return output

    def _out_of_order(self, course: _Course, what: str) -> str:
        return (
            f"{type(self._model).__name__} {what} when block {course.next_block} of"
            f" {self._path!r} should have come. A pipeline needs a forward that calls each block of"
            " the list once, in order: switch off what skips blocks (`layerdrop=0`, say), or name"
            " another list with `layers=`."
        )

    def _stand_in(
        self, name: str, foreign: ForeignLayer, empty: nn.Module, *arguments: Any, **keywords: Any
    ) -> Any:
        course = self._course
        if course is None:
            return ForeignLayer.forward(foreign, *arguments, **keywords)
        is_behind = course.next_block > course.span.first
        if is_behind or name in self._after:
            taken, found = ("before", "behind") if name in self._before else ("behind", "before")
            raise ValueError(
                f"{name!r} was taken to run {taken} the blocks of {self._path!r}, and is on stage"
                f" {foreign.stage_index} therefore, but it runs {found} them, on this stage. Say so"
                f" in the model's pipeline plan: `model.pp_plan = {{...}}`, with its inputs and"
                " outputs like those of the other parts."
            )
        given = flatten((arguments, keywords))[0]
        device = given[0].device if given else torch.device("cpu")
        returned = self._shapes_of(name, empty, (arguments, keywords))
        return map_tensors(partial(_unknown, fill=course.fill, device=device), returned)

    def _shapes_of(self, name: str, empty: nn.Module, call: tuple[Any, Any]) -> Any:
        """Returns a remote module's result on the meta device.

        torch computes shapes in Python, in milliseconds, and the next micro-batch is likely to have
        the same ones.
        """
        key = _key_of(call)
        if key is None or key != self._latest_keys.get(name):
            args, kwargs = map_tensors(lambda t: t.to("meta"), call)
            with torch.no_grad():
                self._latest[name] = empty(*args, **kwargs)
            self._latest_keys[name] = key
        return self._latest[name]

    def _inspect(self, index: int, received: Any, given: list[tuple[int | str, Any]]) -> None:
        """Checks that no argument of a block depends on placeholders."""
        if _has_nan(received):  # NaNs show nothing then; a dry run's tensors count as NaN, too
            return
        leaks = [str(name) for name, value in given if _has_nan(value)]
        if leaks:
            raise ValueError(
                f"{_INSTEAD} Block {index} of {self._path!r} is given the arguments {leaks} that"
                f" depend on one of {sorted(self._before)}, which live on the first stage. Only"
                f" what a block returns travels between stages, so {type(self._model).__name__}"
                " cannot be cut between its blocks."
            )


class _GuardedBlocks(nn.ModuleList):
    """The list of blocks, which yields wrapped blocks to a loop over it."""

    def __init__(self, blocks: nn.ModuleList, gate: Callable[..., Any]) -> None:
        super().__init__()
        self._modules = blocks._modules
        self._gate = gate

    def __iter__(self) -> Iterator[Any]:
        for index, block in enumerate(self._modules.values()):
            yield _GuardedBlock(block, partial(self._gate, index, block))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


class _GuardedBlock:
    """A block whose call is intercepted."""

    def __init__(self, block: nn.Module, gate: Callable[..., Any]) -> None:
        self._block = block
        self._gate = gate

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._gate(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        # A remote block still has its attributes: the kind of its attention, a dtype.
        is_foreign = isinstance(self._block, ForeignLayer)
        return getattr(self._block.described if is_foreign else self._block, name)


def _key_of(tree: Any) -> bytes | None:
    """Returns what a result's shapes depend on; None if it cannot be compared."""
    tensors, skeleton = flatten(tree)
    kinds = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]
    try:
        return pickle.dumps((kinds, skeleton))
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError):
        return None


def _unknown(tensor: Tensor, fill: float, device: torch.device | None = None) -> Tensor:
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return torch.full_like(tensor, fill if has_nan else 0, device=device, requires_grad=False)


def _has_nan(tree: Any) -> bool:
    floating = (t for t in flatten(tree)[0] if t.is_floating_point() or t.is_complex())
    return any(bool(t.isnan().any()) for t in floating)
