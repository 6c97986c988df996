"""Makes a graph of a module's forward with torch.export, or explains why that is not possible.

``torch.export`` runs the forward with tensors without values and records the operations. Other code
leaves no trace, and for Python loops or branches on sizes that is right. Some things would be lost
silently, and raise an error here: a ``torch.autograd.Function`` (its forward would be recorded and
differentiated, without its own backward), an attribute that the forward assigns (a buffer, too, but
for the outermost module's), a tensor whose ``data`` it sets, a branch on ``requires_grad``, and a
batch size that the forward has fixed. If the forward reads a value, torch raises an error; here the
line of the user's code is added.
"""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.export import Dim, ExportedProgram
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_dist.engine.splitting.tracing.call import Call, fixed_sizes, input_values
from lightning_dist.engine.splitting.tracing.user_code import (
    is_called_by_user,
    is_the_users,
    users_line,
)
from lightning_dist.engine.tensors.rng import python_state

_CUSTOM_OP = (
    "whose backward a graph would lose. Write it as a `torch.library.custom_op` with"
    " `register_autograd`, or build the model as an `nn.Sequential` and name it with `layers=`,"
    " which traces nothing."
)
_COPY = (
    "which a graph does not do. Write into it in place, under `torch.no_grad()`:"
    " `tensor.copy_(...)`."
)
_FROZEN = (
    "but a graph is for whatever is frozen. Decide by `torch.is_grad_enabled()` or"
    " `self.training`, or by an attribute that is set where weights are frozen."
)
# Where torch defines the Functions of `custom_op` and of `cond`, which graphs have as operators.
_OF_OPERATORS = ("torch._library.", "torch._higher_order_ops.")
_INSTEAD = (
    "Change that part, or build the model as an `nn.Sequential` and name it with `layers=`, which"
    " traces nothing."
)


def export(
    module: nn.Module,
    call: Call,
    *,
    has_grad: bool,
    autocast: torch.dtype | None,
) -> ExportedProgram:
    """Traces a module in the present training or evaluation mode of each part.

    Args:
        module: The module; its values are not used.
        call: An example. Its sizes of 0 and 1 are constants of the graph.
        has_grad: Whether calls compute gradients. Without, a block under `no_grad` leaves no trace.
        autocast: The dtype of the autocast that calls run under; None for none.

    Raises:
        ValueError: The forward cannot be represented by a graph.
    """
    _refuse_open_keywords(module, call)
    shapes = pytree.tree_map(_open_dims, dict(call.arguments))
    before = python_state()
    with (
        torch.inference_mode(False),
        torch.set_grad_enabled(has_grad),
        # The operations are recorded without their casts; the forward sees the dtypes.
        torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False),
        _nothing_lost(module),
        _quiet(),
        _no_masks_compared(module),
        # Distributions look at the values of their parameters otherwise, which a graph has not.
        mock.patch.object(Distribution, "_validate_args", False),
    ):
        try:
            program = torch.export.export(
                module, call.args, call.kwargs, dynamic_shapes=shapes, strict=False
            )
        except _LostError as error:
            what, advice = error.args
            raise ValueError(
                f"The forward {what}{users_line(error.__traceback__)}, {advice}"
            ) from None
        except Exception as error:
            raise ValueError(_explain(error)) from error
    if python_state() != before:
        raise ValueError(
            "The forward draws numbers by `random` or `numpy.random`, which a graph would repeat at"
            " each call. Draw them by torch (`torch.rand(())` with `torch.where`), or in the step,"
            " and pass a tensor."
        )
    _refuse_fixed_batch(program, call)
    return program


def _refuse_open_keywords(module: nn.Module, call: Call) -> None:
    for name, parameter in inspect.signature(module.forward).parameters.items():
        given = call.arguments.get(name)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and given:
            raise ValueError(
                f"The call gives {', '.join(map(repr, given))} to the forward's `**{name}`, which"
                " torch.export does not trace. Name what is used in the forward's signature, with a"
                " default where a call may leave it out, and leave the rest out of the call."
            )


class _LostError(Exception):
    """The forward does what a graph would lose: what, and what to do instead."""


class _Attributes(TorchFunctionMode):
    """Watches the attributes of tensors that the user's code reads and sets.

    Code may read and write the ``data`` of a tensor, but not set it: a graph does not follow it, as
    it does ``detach()``, which is the same memory. And a graph is for frozen weights, too, of which
    no stage knows the other's.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DATA and is_called_by_user():
            if func == _DATA[0]:
                return args[0].detach()
            raise _LostError("sets the data of a tensor", _COPY)
        if func == _REQUIRES_GRAD and is_called_by_user():
            raise _LostError("asks for `requires_grad`", _FROZEN)
        return func(*args, **(kwargs or {}))


_REQUIRES_GRAD = Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


@contextmanager
def _nothing_lost(root: nn.Module) -> Iterator[None]:
    """Raises an error for code that torch silently leaves out of graphs."""

    def no_new_buffer(module: nn.Module, name: str, value: Tensor | None) -> None:
        is_new = value is not module._buffers.get(name)  # `+=` sets what it has written into
        if is_new and module is not root and is_called_by_user():  # of the root's torch takes care
            raise _LostError(f"sets the buffer {name!r} of a {type(module).__name__}", _COPY)

    apply = inspect.getattr_static(torch.autograd.Function, "apply")  # of C or of Python

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith(_OF_OPERATORS):
            return apply.__get__(None, cls)(*args, **kwargs)
        raise _LostError(f"calls {cls.__name__}, a torch.autograd.Function", _CUSTOM_OP)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            mock.patch.object(torch.autograd.Function, "apply", classmethod(refuse)),
            register_module_buffer_registration_hook(no_new_buffer),
            _Attributes(),
        ):
            yield
    for text in (str(warning.message) for warning in caught):
        before, found, _ = text.partition(" assigned during export")
        listed = before.partition("attribute")[2].split()
        names = [word.strip(",") for word in listed if word.startswith("self.")]
        # torch's recurrent layers assign the value that the attribute has already.
        kept = [name for name in names if "._flat_weights[" not in name]
        if found and (kept or not names):
            raise ValueError(
                f"The forward assigns {', '.join(kept) or text}, which a graph does not do. Return"
                " it from the forward; or, if it is a mask or a table, make it in each call, or as"
                " a buffer in `__init__`; or, if it is a running value, register it as a buffer and"
                " write into that in place."
            )


@contextmanager
def _no_masks_compared(module: nn.Module) -> Iterator[None]:
    """Tells torch's transformers that no mask is causal, or they read its values to find out.

    It is a hint for the choice of a kernel: the mask is applied in either case.
    """

    def tell(part: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        is_encoder = isinstance(part, nn.TransformerEncoder)
        input_name, name, hint = (
            ("src", "mask", "is_causal") if is_encoder else ("tgt", "tgt_mask", "tgt_is_causal")
        )
        bound = inspect.signature(part.forward).bind(*args, **kwargs)
        given = bound.arguments
        mask, dtype = given.get(name), given[input_name].dtype
        if mask is not None and given.get(hint) is None:
            given[hint] = False
            # The kernel takes no double mask for others, and misreads a single one for doubles.
            if mask.is_floating_point() and torch.float64 in (mask.dtype, dtype):
                given[name] = mask.to(dtype)
        return bound.args, bound.kwargs

    with ExitStack() as hooks:
        for part in module.modules():
            forward = type(part).forward
            if forward in (nn.TransformerEncoder.forward, nn.TransformerDecoder.forward):
                hook = part.register_forward_pre_hook(tell, with_kwargs=True)
                hooks.callback(hook.remove)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps torch from printing graphs; the error says enough."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()):  # where half a graph is printed
            yield
    finally:
        logger.setLevel(before)


def _open_dims(leaf: Any) -> Mapping[int, Any] | None:
    """Returns the open sizes of a tensor; torch would fix sizes of 0 and 1, and warn."""
    if not isinstance(leaf, Tensor):
        return None
    return {dim: Dim.AUTO if size > 1 else Dim.STATIC for dim, size in enumerate(leaf.shape)}


def _explain(error: Exception) -> str:
    text = str(error).strip()
    reason = (text.splitlines()[0] if text else type(error).__name__).removesuffix(".")
    advice = _INSTEAD
    if "data-dependent" in text.lower() or "DataDependent" in type(error).__name__:
        advice = (
            "A graph has one way through the forward for all values: choose with `torch.where` (or"
            " `torch.cond`), or decide in `training_step`; take numbers from Python, as `range`"
            " gives them, and not from a tensor by `tolist()` or `item()`. " + _INSTEAD
        )
    place = users_line(error.__traceback__)
    return f"torch.export cannot trace the forward{place}. It says: {reason}. {advice}"


def _refuse_fixed_batch(program: ExportedProgram, call: Call) -> None:
    """Refuses a graph that takes no other batch size than the example's."""
    size = call.batch_size
    if (
        size is not None
        and size > 1
        and size in {s[0] for s in fixed_sizes(program, call).values() if s}
    ):
        raise ValueError(
            f"The forward takes the batch size for a constant, {size} as in the example,"
            f" but micro-batches, and last batches, may have other sizes{_fixed_at(program)}. Take"
            " the size from the tensor, as in `x.view(x.shape[0], -1)` or `x.flatten(1)`; `len(x)`"
            " gives a constant."
            " Where dim 0 is time (`batch_first=False`), lay batches out as [samples, time, ...]."
        )


def _fixed_at(program: ExportedProgram) -> str:
    """Names the line that has fixed a size, where torch has noted it (a private note)."""
    values = [value for value in input_values(program) if isinstance(value, Tensor)]
    shapes = getattr(getattr(values[0], "fake_mode", None), "shape_env", None)
    for frames in getattr(shapes, "specialization_stacks", {}).values():
        for frame in reversed(list(frames or [])):
            if is_the_users(frame.filename):
                return f": see {frame.filename}:{frame.lineno}, `{frame.line}`"
    return ""
