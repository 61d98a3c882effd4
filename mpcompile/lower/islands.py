"""Run recurrent layers on the device's own fused kernel, between separately compiled pieces.

AOTAutograd and Inductor know an RNN only as a loop over time steps, unrolled into the graph: that
takes minutes to compile, although cuDNN and oneDNN have a kernel. So the graph is cut at every RNN
node. The pieces around it are compiled one by one; the RNN itself (an *island*) is called as an
operator, on tensors of the dtype that the passes gave them, and autograd links the parts as it
links any two compiled functions.

    before                          after, three sections
    h = linear(x, w)                (h,) = compiled_0(x, w)
    r = lstm(h, [h0, c0], ...)      (o,) = island_1(h, h0, c0, ...)
    o = getitem(r, 0)               (y,) = compiled_2(o)
    y = relu(o)

1. Walk the nodes: an RNN node with its getitems is an island, the nodes between two are a piece.
   Both are sections. (The caller may name other operators that run as they are: islands, too.)
2. Make each section a graph of its own: its inputs are the values it takes from outside, its
   outputs those that a later section or the caller reads. `set_grad_enabled` doesn't reach across a
   cut: a section that starts in another grad mode than the graph enters that mode itself, and
   leaves it again.
3. Compile the pieces in order on FakeTensors, and run each on them to learn the inputs of the next:
   sizes, strides, aliases, and which values require a gradient.

NOTE [Strides at a cut] Inductor compiles for the strides of the example inputs, and keeps the
strides of a graph's results (`config.keep_output_stride`), so the results of a piece have the
strides of its FakeTensors. An RNN kernel promises no strides, so an island makes its results dense
in the order in which oneDNN and cuDNN write them, time first: `contiguous()` then copies nothing.
If a stride were wrong all the same, Inductor's check of its inputs (`config.size_asserts`) raises:
the numbers are never wrong.

NOTE [Writes across a cut] A piece may write to its inputs: buffers, or results of another piece.
The partitioner may have saved such a result for its backward, though; autograd then raises, as it
does between any two compiled functions. The functionalize pass leaves few such writes.

NOTE [Why not an opaque operator] One custom operator for each RNN would keep the graph whole, but
its backward would have to save all that each device's kernel saves (cuDNN's reserve, oneDNN's
workspace, one tape per time step for a GRU on CPU, which has no fused kernel). Autograd does that.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from unittest import mock

import torch
from torch import fx

from ..errors import CannotRewrite
from ..ir.fakes import fake_twin
from ..ir.targets import ENTER_AUTOCAST, SET_GRAD_ENABLED
from ..rules import PACKETS, RNN_OPS
from ..torch_inside.autograd import set_grad_enabled
from ..torch_inside.fakes import TracingContext, enable_python_dispatcher, tracing
from ..torch_inside.graphs import set_source, set_sources, source_of, sources_of
from ..torch_inside.ops import schema

aten = torch.ops.aten

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def name_rnns(gm: fx.GraphModule) -> None:
    """Rename the RNN calls of Dynamo's graph to their ATen operators; leave the rest unchanged."""
    for node in gm.graph.nodes:
        if packet := PACKETS.get(node.target):
            # (input, hx, params, has_biases, ...) or (data, batch_sizes, hx, params, ...)
            node.target = packet.input if isinstance(node.args[3], bool) else packet.data


def has_rnn(gm: fx.GraphModule) -> bool:
    """Whether the graph must be cut.

    Raises:
        CannotRewrite: an RNN is in the body of a higher-order operator, where no cut is possible.
    """
    bodies = [m for m in gm.modules() if isinstance(m, fx.GraphModule) and m is not gm]
    for node in (node for body in bodies for node in body.graph.nodes):
        if node.target in RNN_OPS:
            raise CannotRewrite(
                f"{node.target} is inside the body of a higher-order operator, such as an"
                " activation checkpoint, where it can't be kept on the device's own kernel"
            )
    return any(node.target in RNN_OPS for node in gm.graph.nodes)


def pieces(graph: fx.Graph, apart: Callable[[fx.Node], bool]) -> list[list[fx.Node]]:
    """The operators before, between and behind RNNs, as they are compiled together.

    Args:
        apart: see `compile_around_rnns`.
    """
    sections, _ = _schedule(graph, torch.is_grad_enabled(), apart)
    return [section.nodes for section in sections if not section.island]


def rnn_results(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The results of an RNN operator, uninitialised: their sizes need no loop over time.

    Returns:
        `(output, h_n)`, for an LSTM `(output, h_n, c_n)`, in the dtype and on the device of the
        input, with the strides of an island's results. They are no leaves, and require a gradient
        if the kernel's results would.
    """
    given = _bind(target, args, kwargs)
    source = given["input"] if "input" in given else given["data"]
    states = given["hx"] if isinstance(given["hx"], (list, tuple)) else [given["hx"]]
    width = states[0].shape[-1] * (2 if given["bidirectional"] else 1)  # after any projection
    if given.get("batch_first"):
        batch, time, _features = source.shape
        output = source.new_empty((time, batch, width)).transpose(0, 1)
    else:
        output = source.new_empty((*source.shape[:-1], width))
    results = [output, *(source.new_empty(state.shape) for state in states)]
    parents = (source, *states, *given["params"])
    if torch.is_grad_enabled() and any(parent.requires_grad for parent in parents):
        results = [result.requires_grad_().clone() for result in results]
    return tuple(results)


def compile_around_rnns(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_piece: Compiler,
    apart: Callable[[fx.Node], bool] = lambda node: False,
) -> Callable[..., Any]:
    """Cut the graph at its RNN nodes, compile the pieces, return a function that runs the whole.

    Args:
        gm: a pre-dispatch ATen graph that returns a tuple; left unchanged.
        example_inputs: one for each placeholder: real or fake tensors, SymInts.
        compile_piece: makes a function from a graph and its inputs; it may change the graph.
        apart: whether an operator is to run as it is, outside of any piece.

    Raises:
        CannotRewrite: a value that is neither a tensor nor a symbolic number must cross a cut.
    """
    context = TracingContext.try_get()
    assert context is not None
    base = torch.is_grad_enabled()
    placeholders = gm.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, example_inputs, strict=True))
    sections, final = _schedule(gm.graph, base, apart)
    _connect(gm.graph, sections, [node for node in given if isinstance(given[node], torch.SymInt)])

    twin = _FakeRun(gm, {node: fake_twin(value, context) for node, value in given.items()})
    run: list[Callable[..., Any]] = []
    for section in sections:
        module = _outline(gm, section, base)
        if section.island:
            run.append(_in_grad_mode(module.forward, section.grad, base))
        else:
            # A compile leaves metadata on the tracing context, and a backward that is compiled late
            # reads it there: each piece needs a context of its own.
            inputs = [given.get(node, twin.env.get(node)) for node in section.inputs]
            with tracing(copy.copy(context)):
                run.append(compile_piece(module, inputs))
        # After compiling: if the piece writes to its inputs, this changes the FakeTensors.
        twin.run_section(section, context)
    return _runner(gm.graph, sections, run, None if final is base else final)


# -- cutting --------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Section:
    """Nodes that run together: an RNN node with its getitems or another operator that runs as it is
    (an island), or a piece to compile.
    """

    island: bool
    grad: bool  # the grad mode it starts in
    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)


def _schedule(
    graph: fx.Graph, base: bool, apart: Callable[[fx.Node], bool]
) -> tuple[list[_Section], bool]:
    """The sections in the order of the graph, and the grad mode at the graph's end."""
    sections: list[_Section] = []
    grad = base
    results: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in results:
            continue
        if node.target in RNN_OPS:
            assert all(user.target is operator.getitem for user in node.users)
            sections.append(_Section(True, grad, [node, *node.users]))
            results.update(node.users)
            continue
        if apart(node):
            sections.append(_Section(True, grad, [node]))
            continue
        if not sections or sections[-1].island:
            sections.append(_Section(False, grad, []))
        sections[-1].nodes.append(node)
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
    busy = [s for s in sections if any(n.target is not SET_GRAD_ENABLED for n in s.nodes)]
    return busy, grad


def _connect(graph: fx.Graph, sections: list[_Section], symbols: list[fx.Node]) -> None:
    """Set the inputs and outputs of each section. Raises CannotRewrite, see `compile_around_rnns`.

    Every piece takes all symbols: Inductor can read `s` from an argument, but not from `2 * s`.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    owner = {node: section for section in sections for node in section.nodes}
    taken: dict[_Section, set[fx.Node]] = {
        section: set() if section.island else set(symbols) for section in sections
    }
    wanted: set[fx.Node] = set(graph.output_node().all_input_nodes)
    for node, section in owner.items():
        for value in node.all_input_nodes:
            if value.op != "get_attr" and owner.get(value) is not section:
                taken[section].add(value)
                wanted.add(value)
    for section in sections:
        section.inputs = sorted(taken[section], key=position.__getitem__)
        section.outputs = [node for node in section.nodes if node in wanted]
        for node in section.outputs:
            if node.target is ENTER_AUTOCAST:
                raise CannotRewrite("an autocast region reaches across an RNN")


def _outline(gm: fx.GraphModule, section: _Section, base: bool) -> fx.GraphModule:
    """The section as its own graph, with the notes that AOTAutograd reads from Dynamo's graphs."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for node in section.inputs:
        placeholder = new[node] = graph.placeholder(node.name)
        placeholder.meta = copy.copy(node.meta)  # "tensor_dict": is its address static?
        source = source_of(node) if node.op == "placeholder" else None
        set_source(placeholder, source)
    grad = section.grad
    if not section.island and grad is not base:
        graph.call_function(SET_GRAD_ENABLED, (grad,))
    for node in section.nodes:
        for value in node.all_input_nodes:
            if value.op == "get_attr" and value not in new:
                new[value] = graph.node_copy(value)
        new[node] = graph.node_copy(node, new.__getitem__)
        if node.target is SET_GRAD_ENABLED:
            grad = bool(node.args[0])
    if section.nodes[0].target in RNN_OPS:
        _make_dense(graph, section.nodes[0], new)
    elif not section.island and grad is not base:
        graph.call_function(SET_GRAD_ENABLED, (base,))
    graph.output(tuple(new[node] for node in section.outputs))

    piece = fx.GraphModule(gm, graph)
    piece.meta = dict(gm.meta)
    sources = sources_of(gm)
    names = [name for name, _ in (*piece.named_parameters(), *piece.named_buffers())]
    set_sources(piece, {name: sources[name] for name in names})
    return piece


def _make_dense(graph: fx.Graph, rnn: fx.Node, new: dict[fx.Node, fx.Node]) -> None:
    """Make the results of an RNN dense: see NOTE [Strides at a cut]."""
    time_second = _bind(rnn.target, rnn.args, rnn.kwargs).get("batch_first", False)
    for result in rnn.users:
        value = new[result]
        if time_second and result.args[1] == 0:
            value = graph.call_function(aten.transpose.int, (value, 0, 1))
            value = graph.call_function(aten.contiguous.default, (value,))
            new[result] = graph.call_function(aten.transpose.int, (value, 0, 1))
        else:
            new[result] = graph.call_function(aten.contiguous.default, (value,))


def _bind(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in schema(target).arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


# -- values that cross a cut ----------------------------------------------------------------------


class _FakeRun(fx.Interpreter):
    """Runs the sections of a graph on FakeTensors, one after the other."""

    def __init__(self, gm: fx.GraphModule, inputs: dict[fx.Node, Any]) -> None:
        super().__init__(gm)
        self.env = {**inputs, **{n: self.run_node(n) for n in gm.graph.find_nodes(op="get_attr")}}

    def run_section(self, section: _Section, context: TracingContext) -> None:
        fake_mode = context.fake_mode
        assert fake_mode is not None
        with (
            fake_mode,
            mock.patch.object(fake_mode, "allow_non_fake_inputs", True),  # constants of the graph
            enable_python_dispatcher(),  # decompositions that keep sizes symbolic
            torch.set_grad_enabled(section.grad),
        ):
            for node in section.nodes:
                self.env[node] = self.run_node(node)
        for node in section.outputs:
            value = self.env[node]
            if not isinstance(value, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise CannotRewrite(
                    f"{node.name}, a {type(value).__name__}, would have to pass by an RNN, which"
                    " runs outside of the compiled graph"
                )

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in RNN_OPS:
            return rnn_results(target, args, kwargs)
        return super().call_function(target, args, kwargs)


# -- run time -------------------------------------------------------------------------------------


def _in_grad_mode(function: Callable[..., Any], grad: bool, base: bool) -> Callable[..., Any]:
    if grad is base:
        return function

    def run(*args: Any) -> Any:
        with torch.set_grad_enabled(grad):
            return function(*args)

    return run


def _picker(indices: Sequence[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Items at the indices, as a tuple, picked in C."""
    if len(indices) > 1:
        return cast("Callable[[list[Any]], tuple[Any, ...]]", operator.itemgetter(*indices))
    return lambda values: tuple(values[i] for i in indices)


def _runner(
    graph: fx.Graph,
    sections: list[_Section],
    functions: list[Callable[..., Any]],
    leave: bool | None,
) -> Callable[..., Any]:
    """A function that calls the sections in order on one list of values, and drops each value after
    its last use.

    `leave`: the grad mode at the end, or None if it is the same as at the start.
    """
    slot = {node: i for i, node in enumerate(graph.find_nodes(op="placeholder"))}
    last: dict[fx.Node, _Section] = {}
    for section in sections:
        for node in section.outputs:
            slot[node] = len(slot)
            last[node] = section  # dropped at once, unless a later section reads it
        last.update((node, section) for node in section.inputs if node in last)
    (returned,) = graph.output_node().args
    assert isinstance(returned, (tuple, list))
    for node in graph.output_node().all_input_nodes:
        last.pop(node, None)

    calls = [
        (
            function,
            _picker([slot[node] for node in section.inputs]),
            slice(slot[section.outputs[0]], slot[section.outputs[-1]] + 1)
            if section.outputs
            else slice(0, 0),
            [slot[node] for node, user in last.items() if user is section],
        )
        for section, function in zip(sections, functions, strict=True)
    ]
    # The caller may want constants too (None, for example).
    constants = [value for value in returned if not isinstance(value, fx.Node)]
    blank = [None] * sum(len(section.outputs) for section in sections) + constants
    constant_slot = iter(range(len(slot), len(slot) + len(constants)))
    pick_results = _picker(
        [slot[v] if isinstance(v, fx.Node) else next(constant_slot) for v in returned]
    )

    def run(*args: Any) -> tuple[Any, ...]:
        values = [*args, *blank]
        for function, pick, place, done in calls:
            values[place] = function(*pick(values))
            for i in done:
                values[i] = None
        if leave is not None:
            set_grad_enabled(leave)
        return pick_results(values)

    return run
