"""Runs a model's own forward on a stage, with blocks that live on other stages.

The forward loops over a list of wrapped blocks. :class:`BlockRoute` intercepts each call outside of
all hooks of the block. Blocks before the stage's own return placeholders, and the last of these
returns the received activation. After the last own block the forward ends, except on the last
stage, where norm, head and loss follow.

An embedding that is remote returns placeholders of the shapes that its structure on the meta device
computes. In the first run of each mode, all that is computed from placeholders is marked
(:class:`.DependenceWatch`), and must not reach a block of the stage or the
result. Placeholders are NaN, so that a forward that takes another way later on ends with a loss of
NaN.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.placed_parameters import PlacedParameters
from lightning_dist.engine.splitting.remote_layer import RemoteLayer
from lightning_dist.engine.tensors.module_tree import dotted, set_attribute
from lightning_dist.engine.tensors.observers import DependenceWatch
from lightning_dist.engine.tensors.patch import replaced
from lightning_dist.engine.tensors.tree import flatten, map_tensors, tensors_in

_INSTEAD = (
    "Let PipelineStrategy trace the model with layers='trace', or put an `nn.Sequential` of layers"
    " that hand on all they need into your module."
)


_List: TypeAlias = nn.ModuleList | nn.Sequential


# No `Exception`, so that a model's `except Exception` does not stop it.
class _BlocksLeft(BaseException):  # noqa: N818
    """Ends the model's forward after a stage's last block."""


@dataclass(slots=True)
class _ForwardRun:
    """One run of the forward."""

    span: range  # of the stage's blocks
    received: Any  # the activation from the stage before
    watch: DependenceWatch | None  # of the placeholders; None once the stage is checked
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
        direct: Parameters that the modules around the blocks hold themselves.
        loss_placeholders: Returns the NaNs that are in place of what only the last stage has.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        before: Collection[str],
        after: Collection[str],
        run: Callable[..., Any],
        direct: Sequence[PlacedParameters] = (),
        loss_placeholders: Callable[[], Mapping[str, Tensor]] = dict,
    ) -> None:
        self._model = model
        self._path = path
        self._before = before
        self._after = after
        self._run_block = run
        self._direct = direct
        self._loss_placeholders = loss_placeholders
        self._blocks = cast(_List, model.get_submodule(path))
        self._forward: Callable[..., Any] = model.forward
        self._forward_run: _ForwardRun | None = None
        self._checked: set[tuple[range, bool]] = set()  # by training mode
        # Results of remote modules, without values, and what their shapes depend on.
        self._latest: dict[str, tuple[bytes | None, Any]] = {}

    def attach(self) -> None:
        """Replaces the list of blocks of the cut model, and the forwards of remote modules."""
        self._forward = self._model.forward
        set_attribute(self._model, self._path, _guarded(self._blocks, self._call))
        for name, module in self._remote_modules():
            stand_in = partial(self._stand_in, name, module, module.meta_copy())
            module.forward = stand_in  # type: ignore[method-assign]

    def detach(self) -> None:
        """Restores the list of blocks and the forwards."""
        set_attribute(self._model, self._path, self._blocks)
        for _, module in self._remote_modules():
            del module.forward

    def _remote_modules(self) -> list[tuple[str, RemoteLayer]]:
        parts = {name: self._model.get_submodule(name) for name in (*self._before, *self._after)}
        return [(name, part) for name, part in parts.items() if isinstance(part, RemoteLayer)]

    def run(
        self, span: range, received: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Runs the model's forward, up to the stage's last block.

        Args:
            span: Indices of the stage's blocks.
            received: Output of the block before them, from its stage; ignored on the first stage.
            arguments: Positional arguments of the forward.
            keywords: Keyword arguments of the forward.

        Returns:
            The last own block's output; on the last stage the forward's result.

        Raises:
            ValueError: The forward does not call each block once and in order, or it uses a module
                or value of another stage.
        """
        key = (span, self._model.training)
        watch = None
        remote = [placed for placed in self._direct if self._is_remote(placed, span)]
        unknown = [placed.unknown() for placed in remote]
        loss_placeholders = self._loss_placeholders()
        if (span.start > 0 or loss_placeholders or any(unknown)) and key not in self._checked:
            self._checked.add(key)
            watch = DependenceWatch(self._refuse_read)
            watch.mark((unknown, [*loss_placeholders.values()]))
        self._forward_run = run = _ForwardRun(span, received, watch)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._without_nested_tensors())
                for placed, values in zip(remote, unknown, strict=True):
                    stack.enter_context(placed.in_place(values))
                stack.enter_context(watch or nullcontext())
                result = self._forward(*arguments, **keywords)
        except _BlocksLeft:
            return run.output
        finally:
            self._forward_run = None
        if run.next_block < span.stop:
            raise ValueError(self._out_of_order(run, "ended"))
        if watch is not None:
            self._check_end(watch, result)
        return result

    def _without_nested_tensors(self) -> AbstractContextManager[None]:
        """Lets torch's encoder keep padding in evaluation: its blocks would have to send others."""
        holder = self._model.get_submodule(self._path.rpartition(".")[0])
        is_torchs = isinstance(holder, nn.TransformerEncoder)
        return replaced([(vars(holder), "use_nested_tensor", False)] if is_torchs else [])

    def _check_end(self, watch: DependenceWatch, result: Any) -> None:
        """Checks the result, and tensors that modules around the blocks keep for steps to read."""
        if watch.has_marked(result):
            raise ValueError(
                f"{_INSTEAD} {type(self._model).__name__} uses a value from before the blocks of"
                f" {self._path!r} behind them, and only what a block returns travels between"
                " stages."
            )
        for holder in accumulate(["", *self._path.split(".")[:-1]], dotted):
            module = self._model.get_submodule(holder)
            for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
                if isinstance(value, Tensor) and watch.has_marked(value):
                    raise ValueError(
                        f"The forward of {type(self._model).__name__} leaves in"
                        f" {dotted(holder, name)!r} what it computes of {self._remote_values()},"
                        " where this stage has no value. Let it return the value, or compute it"
                        " behind the blocks."
                    )

    def _is_remote(self, placed: PlacedParameters, span: range) -> bool:
        """Returns whether parameters are another stage's, on whatever rank that is."""
        return span.start > 0 if placed.is_first else span.stop < len(self._blocks)

    def _call(self, index: int, block: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        run = self._forward_run
        if run is None:
            return block(*arguments, **keywords)
        if index != run.next_block:
            raise ValueError(self._out_of_order(run, f"called block {index}"))
        span = run.span
        run.next_block += 1
        if index < span.start:
            is_next_own = index + 1 == span.start
            if run.placeholder is None and not is_next_own:
                run.placeholder = self._marked(map_tensors(_unknown, run.received))
            return run.received if is_next_own else run.placeholder
        if run.watch is None:
            output = self._run_block(block, *arguments, **keywords)
        else:
            self._check(run.watch, index, [*enumerate(arguments), *keywords.items()])
            with run.watch.paused():
                output = self._run_block(block, *arguments, **keywords)
        if index + 1 == span.stop < len(self._blocks):
            run.output = output
            raise _BlocksLeft
        return output

    def _out_of_order(self, run: _ForwardRun, what: str) -> str:
        return (
            f"{type(self._model).__name__} {what} when block {run.next_block} of"
            f" {self._path!r} should have come. A pipeline needs a forward that calls each block of"
            " the list once, in order: switch off what skips blocks (`layerdrop=0`, say), or name"
            " another list with `layers=`."
        )

    def _stand_in(
        self, name: str, remote: RemoteLayer, empty: nn.Module, *arguments: Any, **keywords: Any
    ) -> Any:
        run = self._forward_run
        if run is None:
            return RemoteLayer.forward(remote, *arguments, **keywords)
        is_behind = run.next_block > run.span.start
        if is_behind or name in self._after:
            taken, found = ("before", "behind") if name in self._before else ("behind", "before")
            raise ValueError(
                f"{name!r} was taken to run {taken} the blocks of {self._path!r}, and is on stage"
                f" {remote.stage_index} therefore, but it runs {found} them, on this stage. Say so"
                f" in the model's pipeline plan: `model.pp_plan = {{...}}`, with its inputs and"
                " outputs like those of the other parts."
            )
        given = tensors_in((arguments, keywords))
        device = given[0].device if given else torch.device("cpu")
        returned = self._shapes_of(name, empty, (arguments, keywords))
        return self._marked(map_tensors(partial(_unknown, device=device), returned))

    def _marked(self, placeholder: Any) -> Any:
        if self._forward_run is not None and self._forward_run.watch is not None:
            self._forward_run.watch.mark(placeholder)
        return placeholder

    def _shapes_of(self, name: str, empty: nn.Module, call: tuple[Any, Any]) -> Any:
        """Returns a remote module's result on the meta device.

        torch computes shapes in Python, in milliseconds, and the next micro-batch is likely to have
        the same ones.
        """
        key = _key_of(call)
        if key is None or name not in self._latest or key != self._latest[name][0]:
            args, kwargs = map_tensors(lambda t: t.to("meta"), call)
            try:
                with torch.no_grad():
                    self._latest[name] = key, empty(*args, **kwargs)
            except RuntimeError as error:
                raise ValueError(
                    f"{_INSTEAD} {name!r} lives on another stage, and the shapes of what it returns"
                    " cannot be computed without values, as where it branches on those of a mask:"
                    f" {error}"
                ) from error
        return self._latest[name][1]

    def _check(
        self, watch: DependenceWatch, index: int, given: list[tuple[int | str, Any]]
    ) -> None:
        """Checks that no argument of a block depends on placeholders."""
        leaks = [str(name) for name, value in given if watch.has_marked(value)]
        if leaks:
            raise ValueError(
                f"{_INSTEAD} Block {index} of {self._path!r} is given the arguments {leaks} that"
                f" depend on {self._remote_values()}. Only what a block returns travels between"
                f" stages, so {type(self._model).__name__} cannot be cut between its blocks."
            )

    def _refuse_read(self) -> None:
        raise ValueError(
            f"{_INSTEAD} {type(self._model).__name__} reads a number (`if`, `item()`) that depends"
            f" on {self._remote_values()}, and is not known on this stage."
        )

    def _remote_values(self) -> str:
        first, last = {*self._before}, set[str]()
        last.update(self._loss_placeholders())
        for placed in self._direct:
            (first if placed.is_first else last).update(placed.names)
        sides = ((first, "first"), (last, "last"))
        parts = [
            f"one of {sorted(names)}, which live on the {side} stage, or on "
            for names, side in sides
            if names
        ]
        return f"{''.join(parts)}a block of another stage"


class _GuardedBlocks(nn.Module):
    """A list or sequence of blocks, which yields wrapped blocks to a loop over it."""

    _gate: Callable[..., Any]

    def __iter__(self) -> Iterator[Any]:
        for index, block in enumerate(self._modules.values()):
            assert block is not None
            yield _GuardedBlock(block, partial(self._gate, index, block))

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


def _guarded(blocks: _List, gate: Callable[..., Any]) -> nn.Module:
    """Returns blocks whose calls are intercepted; a class of the user's and its hooks stay."""
    kind: type = type(type(blocks).__name__, (_GuardedBlocks, type(blocks)), {})
    guarded: nn.Module = object.__new__(kind)
    vars(guarded).update(vars(blocks), _gate=gate)
    return guarded


class _GuardedBlock:
    """A block whose call is intercepted."""

    def __init__(self, block: nn.Module, gate: Callable[..., Any]) -> None:
        self._block = block
        self._gate = gate

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._gate(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        # A remote block still has its attributes: the kind of its attention, a dtype.
        is_remote = isinstance(self._block, RemoteLayer)
        return getattr(self._block.described if is_remote else self._block, name)


def _key_of(tree: Any) -> bytes | None:
    """Returns what a result's shapes depend on; None if it cannot be compared."""
    tensors, skeleton = flatten(tree)
    kinds = [(t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]
    try:
        return pickle.dumps((kinds, skeleton))
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError):
        return None


def _unknown(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    has_nan = tensor.is_floating_point() or tensor.is_complex()
    return torch.full_like(tensor, math.nan if has_nan else 0, device=device, requires_grad=False)
