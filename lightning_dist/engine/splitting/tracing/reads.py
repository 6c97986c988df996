"""What a forward reads of its module while it is traced, besides parameters and buffers.

Whatever a forward reads of an attribute is a constant of its graph: a rate, a flag, a list, a value
of a configuration. So the reads are noted, and a graph is for modules that have the same values at
the same places. No other attribute matters, such as a count that a step goes on with.

Graphs that are first needed in the middle of a run are traced on a copy of the module, for by then
each rank has the tensors of its own layers only. Before such a trace the copy gets the present
values of the attributes that forwards read.
"""

from __future__ import annotations

import copy
import copyreg
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn

from lightning_dist.engine.splitting.tracing.user_code import is_called_by_user, is_the_users
from lightning_dist.engine.tensors.module_tree import dotted
from lightning_dist.engine.tensors.patch import hooks_of
from lightning_dist.engine.tensors.skeleton import skeleton_of

Place: TypeAlias = tuple[str, str]
"""The path of a part in its module, and the name of an attribute."""

Parts: TypeAlias = Mapping[str, nn.Module]
"""The parts of a module by their paths, the module itself included."""

Held: TypeAlias = tuple[Any, ...]
"""The value of an attribute; empty where there is none."""

# What nn.Module keeps for itself. Methods with public names are no values of a user's, either, but
# users give attributes such names: `half`, `type`.
_OF_TORCH = frozenset({"forward", *(name for name in dir(nn.Module()) if name[0] == "_")})
_REGISTERED = ("_parameters", "_buffers", "_modules")
_BY_VALUE = (bool, int, float, complex, str, bytes)
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType, property)
_INSTEAD = (
    "Let a hook, such as `on_train_epoch_start`, set an attribute to the number that the forward"
    " needs."
)


def held_at(parts: Parts, place: Place) -> Held:
    """Returns the value of an attribute, of the object or else of its class."""
    part, name = parts[place[0]], place[1]
    own = vars(part)
    if name in own:
        return (own[name],)
    return (getattr(type(part), name),) if hasattr(type(part), name) else ()


@contextmanager
def recorded_reads(module: nn.Module) -> Iterator[set[Place]]:
    """Returns a context manager that notes the places that a module's forward reads.

    Yields:
        The places, complete at the end.
    """
    owners = {id(vars(part)): (path, vars(part)) for path, part in module.named_modules()}
    parts = [*module.modules()]
    places: set[Place] = set()
    files: dict[str, bool] = {}

    def note(part: nn.Module, name: str, file: str) -> None:
        # Not by the part: torch traces an object of a derived class with the same dict.
        path, own = owners.get(id(object.__getattribute__(part, "__dict__")), ("", None))
        if own is None:
            return
        if name == "__dict__":
            if file not in files:
                files[file] = is_the_users(file)
            if files[file]:
                places.update((path, name) for name in own.keys() - _OF_TORCH)
        elif name not in _OF_TORCH and not any(name in own[held] for held in _REGISTERED):
            places.add((path, name))

    # The compiler calls it where it meets a read; it gives names, for it has no parts.
    @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
    def note_of_all(name: str) -> None:
        for part in parts:
            if hasattr(type(part), name) or name in vars(part):
                note(part, name, "")

    def getattribute(part: nn.Module, name: str) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a branch of `torch.cond`, say
            note_of_all(name)
        else:
            note(part, name, sys._getframe(1).f_code.co_filename)
        return super(nn.Module, part).__getattribute__(name)

    with ExitStack() as noting:

        def begin(*_: Any) -> None:
            noting.enter_context(mock.patch.object(nn.Module, "__getattribute__", getattribute))

        def end(*_: Any) -> None:
            noting.close()

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end, always_call=True)
        yield places


@contextmanager
def recorded_grad_mode() -> Iterator[list[bool]]:
    """Returns a context manager that notes whether the user's code asks for the grad mode.

    Yields:
        The answers that it has got.
    """
    ask, answers = torch.is_grad_enabled, list[bool]()

    def is_grad_enabled() -> bool:
        answer = ask()
        if not torch.compiler.is_dynamo_compiling() and is_called_by_user():
            answers.append(answer)
        return answer

    with mock.patch.object(torch, "is_grad_enabled", is_grad_enabled):
        yield answers


def changed_names(before: Parts, after: Parts) -> list[str]:
    """Lists the attributes that a forward has assigned, or written into.

    Torch itself sees to tensors. Of an object that several parts have, such as a configuration, the
    first name is listed, and which of its own attributes have changed.
    """
    names: dict[int, list[str]] = {}
    for path, part in before.items():
        for name in sorted((vars(part).keys() | vars(after[path]).keys()) - _OF_TORCH):
            held, now = (held_at(parts, (path, name)) for parts in (before, after))
            if not equal_state(held, now, tensors=False):
                names.setdefault(id(now[0] if now else held[0]), _changed(path, name, held, now))
    return sorted(name for listed in names.values() for name in listed)


def _changed(path: str, name: str, held: Held, now: Held) -> list[str]:
    own = [vars(value) for value in (*held, *now) if hasattr(value, "__dict__")]
    inner = own[0].keys() | own[1].keys() if len(own) == 2 else ()
    changed = [key for key in inner if not equal_state(*(values.get(key) for values in own))]
    return [dotted(path, name, key) for key in changed] or [dotted(path, name)]


def changed_places(values: Mapping[Place, Held], parts: Parts) -> Iterator[Place]:
    """Yields the places at which parts have other values than those given."""
    for place, held in values.items():
        now = held_at(parts, place)
        if held and now and held[0] is now[0]:  # mostly, and this runs at each call
            continue
        if len(held) != len(now) or not all(map(equal_state, held, now)):
            yield place


def equal_state(kept: Any, now: Any, *, tensors: bool = True) -> bool:
    """Compares a value with one that was copied from it, or from an earlier state of it.

    Objects of any class are compared as they are copied, by their state. Parameters, buffers and
    modules are equal: a graph gets the ones, and the others' attributes are compared by themselves.

    Args:
        kept: The copy, its parameters and buffers on the meta device.
        now: The value.
        tensors: Whether to compare the values of tensors.
    """
    compared: dict[tuple[int, int], Any] = {}  # objects may refer to each other

    def same(a: Any, b: Any) -> bool:
        if a is b:
            return True
        if isinstance(a, Tensor):  # a parameter, which the rank may not have, or a plain one
            return a.is_meta or (isinstance(b, Tensor) and (not tensors or _equal(a, b)))
        if isinstance(b, weakref.ref):  # recurrent layers have some to their weights, copies none
            return a is None or isinstance(a, weakref.ref)
        if isinstance(a, torch.device):  # graphs follow their tensors
            return isinstance(b, torch.device)
        if type(a) is not type(b):
            return isinstance(a, nn.Module) and isinstance(b, nn.Module)
        if isinstance(a, nn.Module):
            return True
        if isinstance(a, _BY_VALUE):
            return bool(a == b or (a != a and b != b))
        if isinstance(a, _BY_IDENTITY):
            return False
        if isinstance(a, list | tuple) and type(a) in (list, tuple):
            return len(a) == len(b) and all(map(same, a, b))
        if type(a) is dict:
            return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
        if isinstance(a, Collection) and type(a) in (set, frozenset):
            return bool(a == b)
        if (id(a), id(b)) in compared:
            return True
        compared[id(a), id(b)] = a, b
        return same(_state(a), _state(b))

    return same(kept, now)


def _state(value: Any) -> Any:
    """Returns what `copy.deepcopy` makes a copy from; of what it cannot copy nothing is known."""
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        state = value.__reduce_ex__(4) if reduce is None else reduce(value)
    except Exception:
        return None
    if isinstance(state, str):
        return state
    made, *rest = state
    return [made, *(list(part) if isinstance(part, Iterator) else part for part in rest)]


@torch.no_grad()
def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta or b.is_meta:
        return True
    b = b.to(a.device)
    return bool(((a == b) | ((a != a) & (b != b))).all())


class Structure:
    """A module's structure: a copy with tensors on the meta device, and its parts."""

    def __init__(self, module: nn.Module) -> None:
        self.module = skeleton_of(module)
        for hooks in hooks_of(self.module):  # they run around the sequence, as around any other
            hooks.clear()
        self.parts: Parts = dict(self.module.named_modules())
        # A module may leave things out of its copies, as a LightningModule does its trainer.
        self._left_out = {
            (path, name)
            for path, part in module.named_modules()
            for name, value in vars(part).items()
            if value is not None and vars(self.parts[path]).get(name) is None
        }

    def made_on(self, device: torch.device) -> nn.Module:
        """Returns a copy with tensors on a device, for one trace."""
        return skeleton_of(self.module).to_empty(device=device)

    def values_at(self, places: Collection[Place]) -> dict[Place, Held]:
        """Returns the values of attributes, which are never written into."""
        return {place: held_at(self.parts, place) for place in places}

    def check(self, parts: Parts) -> None:
        """Checks that a module still has the parts of the structure.

        Raises:
            ValueError: A part has been replaced by one of another class, or removed.
        """
        other = [n for n, part in self.parts.items() if type(parts.get(n)) is not type(part)]
        if other:
            raise ValueError(
                f"{other} of the traced module are not what they were when it was traced. Replace"
                " parts before the run, in `__init__` or `configure_model`."
            )

    def follow(self, places: Collection[Place], parts: Parts) -> None:
        """Sets attributes to copies of a module's present ones.

        Raises:
            ValueError: A value cannot be copied.
        """
        copies = _counterparts(parts, self.parts)
        for place in sorted(places):
            path, name = place
            own, present = vars(self.parts[path]), vars(parts[path])
            reason = "copies of the module do not have it" if place in self._left_out else ""
            if name not in present:
                own.pop(name, None)
            elif not reason:
                try:
                    own[name] = copy.deepcopy(present[name], copies)
                except Exception as error:
                    reason = f"it cannot be copied: {error}"
            if reason or not equal_state(held_at(self.parts, place), held_at(parts, place)):
                kind = type(present.get(name)).__name__
                raise ValueError(
                    f"The forward reads `{dotted(*place)}`, a {kind}, which graphs cannot follow:"
                    f" {reason or 'a copy is not equal to it'}. {_INSTEAD}"
                )


def _counterparts(parts: Parts, others: Parts) -> dict[int, object]:
    """Returns what a structure has for each part, parameter and buffer of a module, by ids."""
    found: dict[int, object] = {}
    for path, own in others.items():
        part = parts[path]
        found[id(part)] = own
        for mine, its in ((own._parameters, part._parameters), (own._buffers, part._buffers)):
            found |= {id(t): mine[n] for n, t in its.items() if t is not None and n in mine}
    return found
