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
2. Make each section a graph of its own (`sections.py`): its inputs are the values it takes from
   outside, its outputs those that a later section or the caller reads. `set_grad_enabled` doesn't
   reach across a cut: a section that starts in another grad mode than the graph enters that mode
   itself, and leaves it again.
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

NOTE [What gains by being compiled] Where nothing runs in the low dtype, the RNN runs on the
device's own kernel whatever is done with the rest, and a compiled piece costs a call of its own in
the forward and in the backward. What it gains is that its elementwise operators, fused, don't write
each result to memory. So an embedding or a linear layer beside an RNN is faster op by op, a sampled
softmax after it or masked convolutions before it are faster compiled (on a CPU: `python -m
benchmarks run peers`, the LSTM with attention, the big LSTM, Deep Speech 2). A dropout after an RNN
is faster op by op, too: Inductor's C++ draws random numbers one at a time, torch's kernel many
(torch 2.13).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx

from .. import ir
from ..errors import CannotRewrite
from ..ir.fakes import fake_twin
from ..ir.targets import ENTER_AUTOCAST
from ..rules import PACKETS, RNN_OPS
from ..torch_inside.names import TracingContext, enable_python_dispatcher, tracing
from .sections import RunSection, bind, chained, outline, schedule

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


def pieces(graph: fx.Graph, apart: Callable[[fx.Node], bool]) -> list[tuple[fx.Node, ...]]:
    """The operators before, between and after RNNs, as they are compiled together.

    Args:
        apart: see `compile_around_rnns`.
    """
    sections, _ = schedule(graph, torch.is_grad_enabled(), apart)
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
    given = bind(target, args, kwargs)
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
    symbols = [node for node in given if isinstance(given[node], torch.SymInt)]
    sections, final = schedule(gm.graph, base, apart, symbols)
    if any(n.target is ENTER_AUTOCAST for section in sections for n in section.outputs):
        raise CannotRewrite("an autocast region reaches across an RNN")

    twin = _FakeRun(gm, {node: fake_twin(value, context) for node, value in given.items()})
    run: list[Callable[..., Any]] = []
    for section in sections:
        module = outline(gm, section, base)
        if section.island:
            call = module.forward
            run.append(call if section.grad is base else torch.set_grad_enabled(section.grad)(call))
        else:
            # A compile leaves metadata on the tracing context, and a backward that is compiled late
            # reads it there: each piece needs a context of its own.
            inputs = [given.get(node, twin.env.get(node)) for node in section.inputs]
            with tracing(copy.copy(context)):
                run.append(compile_piece(module, inputs))
        # After compiling: if the piece writes to its inputs, this changes the FakeTensors.
        twin.run_section(section, context)
    return chained(gm.graph, sections, run, None if final is base else final)


# -- values that cross a cut ----------------------------------------------------------------------


class _FakeRun(fx.Interpreter):
    """Runs the sections of a graph on FakeTensors, one after the other."""

    def __init__(self, gm: fx.GraphModule, inputs: dict[fx.Node, Any]) -> None:
        super().__init__(gm)
        self.env = {**inputs, **{n: self.run_node(n) for n in gm.graph.find_nodes(op="get_attr")}}

    def run_section(self, section: RunSection, context: TracingContext) -> None:
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


# -- what gains by being compiled ------------------------------------------------------------------

_LEAST = 1 << 20
"""Bytes of results of elementwise operators: so that writing them costs more than a call."""


def gains(piece: Iterable[fx.Node]) -> bool:
    """Whether these operators, which would be compiled together, are faster so."""
    written = (ir.tensor(n) for n in piece if ir.is_op(n) and ir.is_pointwise(n))
    return ir.bytes_of([*written]) >= _LEAST


def is_apart(node: fx.Node) -> bool:
    """Whether an operator is a dropout of what an RNN returns."""
    if node.target is not ir.aten.dropout.default:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and any(n.target in RNN_OPS for n in source.all_input_nodes)
