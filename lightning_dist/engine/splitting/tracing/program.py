"""The graphs of a traced module, cut into layers.

Training and evaluation have different graphs: dropout and norms compute other things, and so may
the user's branches on ``self.training``. The graph in training decides where the layers begin. Any
other graph is traced when it is first needed, on a kept structure without values. It is cut by the
parameters of the layers. All ranks do so alike, for each has all parts of the module, if not all
tensors.

A graph is for calls of one key: which arguments are None (a prediction has no targets), which
sizes are 0 or 1, for there torch takes sizes for constants, and the autocast. And it is for what
the forward has read while it was traced: modes of parts (frozen norms, say), the rate of a dropout,
a value of a configuration. :mod:`.tracing.reads` compares it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_dist.engine.splitting.tracing.call import Call, CallCheck, CallKey, bind, example_of
from lightning_dist.engine.splitting.tracing.export import export
from lightning_dist.engine.splitting.tracing.graph import (
    TraceGraph,
    assign_starts,
    find_anchors,
    find_starts,
    graph_of,
    homes_of_idle_buffers,
    parts_of,
    titles_of,
)
from lightning_dist.engine.splitting.tracing.reads import (
    Held,
    Parts,
    Place,
    Structure,
    changed_names,
    changed_places,
    recorded_grad_mode,
    recorded_reads,
)
from lightning_dist.engine.splitting.tracing.segment import Segment, cut_graph
from lightning_dist.engine.tensors.patch import TracedHook, hooks_of

_TRACED_ON = torch.device("cpu")
_MAX_GRAPHS = 8  # enough unless a number changes at each step


@dataclass(frozen=True, eq=False)
class _Trace:
    """A graph and the calls that it is for."""

    key: CallKey
    has_grad: bool | None  # if the forward has asked for it
    values: Mapping[Place, Held]  # what the forward has read
    check: CallCheck
    graph: TraceGraph

    def fits(self, key: CallKey, parts: Parts) -> bool:
        """Returns whether the graph is for calls with a key, at present."""
        return (
            key == self.key
            and self.has_grad in (None, torch.is_grad_enabled())
            and not any(True for _ in changed_places(self.values, parts))
        )


class TraceProgram:
    """The graphs of a module.

    Args:
        module: The whole module, with its tensors on any device.
        args: Positional arguments of an example call.
        kwargs: Keyword arguments of the example call.
        casts: Changes a structure before it is traced, so that its casts are part of the graph.

    Attributes:
        titles: The first part that uses each layer's parameters.
        names: Each layer's parameters, and the buffers that it uses in training or evaluation.
        uncut: The reasons for omitted cuts.
        canonical: The first name of each parameter and buffer by all of its names.

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
        parts = dict(module.named_modules())
        _refuse_hooks(parts)
        self.casts = casts
        self._module = module
        self._structure = Structure(module)
        self._signature = inspect.signature(module.forward)
        example = _without_graph(example_of(self._signature, bind(self._signature, args, kwargs)))
        self._key = example.key._replace(autocast=None)
        self._examples = {self._key: example}
        self.canonical = _first_names(module)
        self._segments: dict[_Trace, list[Segment]] = {}  # the first is the one not used longest
        self._structure.module.train()
        in_training = in_evaluation = self._trace(self._key, has_grad=True)
        self._structure.module.eval()
        if any(True for _ in changed_places(in_training.values, self._structure.parts)):
            in_evaluation = self._trace(self._key, has_grad=True)
        self._find_layers(in_training, in_evaluation)
        with torch.enable_grad():
            self._current = self._trace_for(self._key, parts)

    def __deepcopy__(self, memo: object) -> TraceProgram:
        """Returns itself: a copy of a layer, for its shapes, needs no other graphs."""
        return self

    def _find_layers(self, in_training: _Trace, in_evaluation: _Trace) -> None:
        """Decides on the layers, by the graph in training."""
        graph, structure = in_training.graph, self._structure.module
        anchors = find_anchors(graph, structure)
        starts, self.uncut = find_starts(graph, structure, anchors)
        while True:
            self._homes = {
                name: index
                for index, nodes in enumerate(parts_of(graph, starts))
                for node in nodes
                for name in graph.held_by(node)
                if name in anchors
            }
            # A parameter that is not used gets no gradient, so its layer does not matter.
            for name, _ in structure.named_parameters():
                self._homes.setdefault(name, len(starts) - 1)
            self._homes |= homes_of_idle_buffers(self._homes, structure)
            self.titles = titles_of(graph, starts)
            self._segments = {
                trace: self._cut(trace) for trace in dict.fromkeys((in_training, in_evaluation))
            }
            apart = self._find_written_apart()
            if apart is None:
                break
            name, first, last = apart
            self.uncut.append(
                f"the buffer {name!r} is written to in place, and used elsewhere in another mode"
            )
            del starts[first + 1 : last + 1]
        homes, all_segments = self._homes.items(), self._segments.values()
        self.names = [
            frozenset(name for name, home in homes if home == index).union(
                *(segments[index].names for segments in all_segments)
            )
            for index in range(len(self.titles))
        ]

    def _cut(self, trace: _Trace) -> list[Segment]:
        starts = assign_starts(trace.graph, self._homes, len(self.titles))
        return cut_graph(trace.graph, starts, _TRACED_ON)

    def _find_written_apart(self) -> tuple[str, int, int] | None:
        """Returns a buffer that several layers use, and some graph writes: name and layers."""
        users: dict[str, set[int]] = {}
        for segments in self._segments.values():
            for index, segment in enumerate(segments):
                for name in segment.names:
                    users.setdefault(name, set()).add(index)
        graphs = [trace.graph for trace in self._segments]
        written = set[str]().union(*(graph.written(graph.names) for graph in graphs))
        apart = [name for name, layers in users.items() if name in written and len(layers) > 1]
        return (apart[0], min(users[apart[0]]), max(users[apart[0]])) if apart else None

    def _trace(self, key: CallKey, *, has_grad: bool) -> _Trace:
        """Traces the structure as it is."""
        structure = self._structure.made_on(_TRACED_ON)
        if self.casts is not None:
            self.casts(structure)
        own, copied = self._structure.parts, dict(structure.named_modules())
        by_copying = changed_names(own, copied)  # a metric's copy wraps an `update` of its own
        assigned: list[str] = []
        # In the trace, for torch puts back what it finds changed behind it.
        structure.register_forward_hook(lambda *_: assigned.extend(changed_names(own, copied)))
        example = self._examples[key]
        with recorded_reads(structure) as reads, recorded_grad_mode() as answers:
            program = export(structure, example, has_grad=has_grad, autocast=key.autocast)
        changed = [name for name in assigned if name not in by_copying]
        if changed:
            raise ValueError(
                f"The forward assigns {changed}, which a graph does not do. Assign such values"
                " before the run, or in the steps or hooks of the LightningModule."
            )
        graph = graph_of(program, self.canonical)
        written = graph.written(graph.attributes)
        if written:
            raise ValueError(
                f"The forward writes into {sorted(written)}, which a graph does not do:"
                " register them as buffers, by `register_buffer`."
            )
        return _Trace(
            key=key,
            has_grad=has_grad if answers else None,
            values=self._structure.values_at(reads),
            check=CallCheck(program, example),
            graph=graph,
        )

    def _trace_for(self, key: CallKey, parts: Parts) -> _Trace:
        """Returns the graph for calls with a key, with what the module's parts have at present."""
        for trace in [*self._segments][::-1]:
            if trace.fits(key, parts):
                self._segments[trace] = self._segments.pop(trace)
                return trace
        known = {place for trace in self._segments for place in trace.values}
        has_grad = torch.is_grad_enabled()
        with torch.inference_mode(False):
            stale = [*changed_places(self._structure.values_at(known), parts)]
            while True:
                self._structure.follow(stale, parts)
                trace = self._trace(key, has_grad=has_grad)
                stale = [*changed_places(trace.values, parts)]
                if not stale:
                    break
        while len(self._segments) >= _MAX_GRAPHS:
            del self._segments[next(iter(self._segments))]
        self._segments[trace] = segments = self._cut(trace)
        self._refuse_far_buffers(trace, segments)
        return trace

    def _refuse_far_buffers(self, trace: _Trace, segments: Sequence[Segment]) -> None:
        """Refuses a later graph that needs a buffer of another layer, which may be far away."""
        written = trace.graph.written(trace.graph.names)
        for index, segment in enumerate(segments):
            for name in segment.names:
                holders = {i for i, names in enumerate(self.names) if name in names}
                if (holders and index not in holders) or (name in written and holders != {index}):
                    raise ValueError(
                        f"The forward uses the buffer {name!r} in another layer than in its first"
                        " traces, in training and evaluation, but the buffer is where these use it."
                        " Let it use its buffers alike, whatever the sizes and attributes are."
                    )

    def begin(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """Prepares for a call of the module.

        Returns:
            The leaves of the call, which the first layer takes.

        Raises:
            ValueError: No graph can be made for this call, or a part has got a hook.
        """
        parts = dict(self._module.named_modules())
        _refuse_hooks(parts)  # of a callback, say
        self._structure.check(parts)
        call = bind(self._signature, args, kwargs)
        key = call.key
        # Without a graph to differentiate, a step may leave arguments out: the targets, say.
        if torch.is_grad_enabled() and key.left_out != self._key.left_out:
            key = self._key
        if key not in self._examples:
            self._examples[key] = _without_graph(call)
        self._current = self._trace_for(key, parts)
        return self._current.check.check(call)

    def same_graph(self) -> Callable[[], None]:
        """Returns a function that goes back to the graph of the latest call, behind later ones."""
        current = self._current

        def go_back() -> None:
            if current not in self._segments:  # it has been dropped meanwhile
                self._segments[current] = self._cut(current)
            self._current = current

        return go_back

    def run(self, index: int, values: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Runs a layer by the graph of the latest call."""
        segment = self._segments[self._current][index]
        buffers = {
            name: self._module.get_buffer(name) for name in segment.names if name not in parameters
        }
        return segment.run(values, {**parameters, **buffers})


def _without_graph(call: Call) -> Call:
    """Returns a call of the same values, as an example for a trace."""
    arguments, args, kwargs = pytree.tree_map(
        lambda leaf: leaf.detach().to(_TRACED_ON) if isinstance(leaf, Tensor) else leaf,
        (dict(call.arguments), call.args, call.kwargs),
    )
    return Call(arguments, args, kwargs)


def _refuse_hooks(parts: Parts) -> None:
    """Refuses parts with forward hooks, which a graph does not run."""
    names = [
        name
        for name, part in parts.items()
        if name and any(not isinstance(h, TracedHook) for hs in hooks_of(part) for h in hs.values())
    ]
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
