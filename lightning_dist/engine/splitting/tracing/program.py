"""The graphs of a traced module, cut into layers.

Training and evaluation have different graphs: dropout and norms compute other things, and so may
the user's branches on ``self.training``. The graph in training decides where the layers begin. The
graph for any other mode, of the whole module or of single parts (frozen norms, say), is traced when
it is first needed, on a kept structure without values. It is cut by the parameters of the layers.
All ranks do so alike, for each has all parts of the module, if not all tensors. Attributes that the
forward reads, such as the rate of a dropout, are constants of a graph, so graphs are keyed by them.
So is which arguments are None: a prediction has no targets.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from lightning_dist.engine.splitting.cut import skeleton_of
from lightning_dist.engine.splitting.tracing.call import Call, CallCheck, bind, example_of
from lightning_dist.engine.splitting.tracing.export import check_of, export
from lightning_dist.engine.splitting.tracing.graph import (
    TraceGraph,
    assign_starts,
    find_anchors,
    find_starts,
    graph_of,
    parts_of,
    titles_of,
)
from lightning_dist.engine.splitting.tracing.segment import Segment, cut_graph
from lightning_dist.engine.tensors.patch import hooks_of

_TRACED_ON = torch.device("cpu")
_MAX_GRAPHS = 8  # enough unless a number changes at each step
_BUILT_IN = frozenset({bool, int, float, str, type(None)})

Mode = tuple[tuple[Any, ...], ...]
"""Names and values of each part's attributes, in the order of ``modules()``."""

Form = tuple[str, ...]
"""The arguments of a call that are None."""


class TraceProgram:
    """The graphs of a module, by mode.

    Args:
        module: The whole module, with its tensors on any device.
        args: Positional arguments of an example call.
        kwargs: Keyword arguments of the example call.
        casts: Changes a structure before it is traced, so that its casts are part of the graph.

    Raises:
        ValueError: The module cannot be traced.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        casts: Callable[[nn.Module], None] | None = None,
    ) -> None:
        _refuse_hooks(module)
        self.casts = casts
        self._module = module
        self._skeleton = skeleton_of(module)
        for hooks in hooks_of(self._skeleton):  # they run around the sequence, as around any other
            hooks.clear()
        self.signature = inspect.signature(module.forward)
        first = bind(self.signature, args, kwargs)
        self._form = first.left_out
        self._examples: dict[Form, Call] = {self._form: self._example_of(first)}
        self.canonical = _first_names(module)
        self._graphs: dict[tuple[Mode, Form], tuple[CallCheck, list[Segment]]] = {}
        in_training = mode_of(self._skeleton.train()), self._form
        program = self._trace(*in_training)
        self._find_layers(graph_of(program, self.canonical))
        self._add(in_training, program)
        self._current = mode_of(module), self._form
        for mode in (self._current[0], mode_of(self._skeleton.eval())):
            self._segments_in((mode, self._form))
        homes, graphs = self._homes.items(), self._graphs.values()
        self._names = [
            frozenset(name for name, home in homes if home == index).union(
                *(segments[index].names for _, segments in graphs)
            )
            for index in range(len(self.titles))
        ]

    def __deepcopy__(self, memo: object) -> TraceProgram:
        """Returns itself: a copy of a layer, for its shapes, needs no other graphs."""
        return self

    def _find_layers(self, graph: TraceGraph) -> None:
        """Decides on the layers, by the graph in training."""
        anchors = find_anchors(graph, self._skeleton)
        starts, self.uncut = find_starts(graph, self._skeleton, anchors)
        self.titles = titles_of(graph, starts)
        self._homes = {
            name: index
            for index, nodes in enumerate(parts_of(graph, starts))
            for node in nodes
            for name in graph.held_by(node)
            if name in anchors
        }
        # A parameter that is not used gets no gradient, so its layer does not matter.
        for name, _ in self._skeleton.named_parameters():
            self._homes.setdefault(name, len(starts) - 1)

    def _example_of(self, call: Call) -> Call:
        given = example_of(self.signature, call)
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf.detach().to(_TRACED_ON) if isinstance(leaf, Tensor) else leaf,
            (given.args, given.kwargs),
        )
        return bind(self.signature, args, kwargs)

    def _trace(self, mode: Mode, form: Form) -> ExportedProgram:
        structure = skeleton_of(self._skeleton).to_empty(device=_TRACED_ON)
        set_mode(structure, mode)
        if self.casts is not None:
            self.casts(structure)
        changed: set[str] = set()
        # In the trace, for torch puts back what it finds changed behind it.
        structure.register_forward_hook(
            lambda *_: changed.update(changed_attributes(structure, mode))
        )
        program = export(structure, self._examples[form])
        if changed:
            raise ValueError(
                f"The forward assigns {sorted(changed)}, which a graph does not do. Assign such"
                " values in the steps or hooks of the LightningModule."
            )
        return program

    def _segments_in(self, key: tuple[Mode, Form]) -> tuple[CallCheck, list[Segment]]:
        if key in self._graphs:
            self._graphs[key] = self._graphs.pop(key)  # the first is the one not used for longest
        else:
            while len(self._graphs) >= _MAX_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._add(key, self._trace(*key))
        return self._graphs[key]

    def _add(self, key: tuple[Mode, Form], program: ExportedProgram) -> None:
        graph = graph_of(program, self.canonical)
        starts = assign_starts(graph, self._homes, len(self.titles))
        segments = cut_graph(graph, starts, _TRACED_ON)
        self._graphs[key] = check_of(program, self._examples[key[1]]), segments

    def names_of_layer(self, index: int) -> frozenset[str]:
        """Names a layer's parameters, and the buffers that it uses in training or evaluation."""
        return self._names[index]

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Prepares for a call of the module.

        Returns:
            The leaves of the call, which the first layer takes.

        Raises:
            ValueError: The graph is not made for this call, or a part has got a hook.
        """
        _refuse_hooks(self._module)  # of a callback, say
        call = bind(self.signature, args, kwargs)
        # Without a graph to differentiate, a step may leave arguments out: the targets, say.
        form = self._form if torch.is_grad_enabled() else call.left_out
        if form not in self._examples:
            self._examples[form] = self._example_of(call)
        self._current = mode_of(self._module), form
        check, _ = self._segments_in(self._current)
        return check.check(call)

    def run(self, index: int, values: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Runs a layer in the mode of the latest call."""
        segment = self._graphs[self._current][1][index]
        buffers = {
            name: self._module.get_buffer(name) for name in segment.names if name not in parameters
        }
        return segment.run(values, {**parameters, **buffers})


def _refuse_hooks(module: nn.Module) -> None:
    """Checks that no part has forward hooks, which a graph does not run."""
    names = [name for name, part in module.named_modules() if name and any(hooks_of(part))]
    if names:
        raise ValueError(
            f"{names} have forward hooks, which a graph does not call. Return what they collect"
            " from the forward; for weight and spectral norm use"
            " `torch.nn.utils.parametrizations`."
        )


def _first_names(module: nn.Module) -> dict[str, str]:
    """Returns the first name of each parameter and buffer by all of its names."""
    first: dict[int, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    tensors = [*parameters, *module.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors}


def mode_of(module: nn.Module) -> Mode:
    """Returns the public numbers, strings and flags of a module's parts."""
    return tuple(_public(part) for part in module.modules())


def set_mode(module: nn.Module, mode: Mode) -> None:
    """Sets the mode of a copy's parts to that of the original module."""
    for part, attributes in zip(module.modules(), mode, strict=True):
        for name in _public(part)[::2]:
            del part.__dict__[name]
        part.__dict__.update(_pairs(attributes))


def changed_attributes(module: nn.Module, mode: Mode) -> list[str]:
    """Names a module's attributes that differ from an earlier mode."""
    pairs = zip(module.named_modules(), mode, strict=True)
    return [
        f"{path}.{name}" if path else name
        for (path, part), attributes in pairs
        for name, _ in {*_pairs(_public(part))} ^ {*_pairs(attributes)}
    ]


def _public(part: nn.Module) -> tuple[Any, ...]:
    """Returns names and values in one flat tuple, for speed: it runs at each call."""
    return tuple(
        entry
        for item in part.__dict__.items()
        if type(item[1]) in _BUILT_IN and item[0][0] != "_"
        for entry in item
    )


def _pairs(attributes: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    return zip(attributes[::2], attributes[1::2], strict=True)
