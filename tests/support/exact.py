"""Run a rewritten graph in FP64, so that nothing but the rewriting itself can change a number."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from compare import weighted_sum
from torch import fx, nn
from torch.fx.node import map_aggregate

from mpcompile import ir
from mpcompile.capture import pipeline
from mpcompile.capture.capture import capture
from mpcompile.capture.surroundings import around_now
from mpcompile.devices.capabilities import TensorCores
from mpcompile.ir import aten
from mpcompile.rules.policy import Config, Level

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CORES = TensorCores(slowdown=2.0, balance=0.0)  # padding always pays


class InFP64:
    """A torch.compile backend: capture, every pass up to `clean` but those named in `without`, then
    the graph in FP64.

    Attributes:
        graphs: each graph compiled, rewritten.
    """

    def __init__(
        self, pad: str, level: str = "O1", without: Collection[str] = (), **settings: Any
    ) -> None:
        self.without = without
        self.graphs: list[fx.GraphModule] = []
        settings.setdefault("cores", CORES)
        self.config = Config(
            level=Level(level), low=torch.float16, device=torch.device("cpu"), pad=pad, **settings
        )

    def __call__(self, gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        graph = capture(gm, examples, around_now(gm, examples))
        for pass_ in pipeline.PASSES[:-1]:
            if pass_.__name__ in self.without:
                continue
            pass_(graph, self.config)
            pipeline.verify(graph, pass_.__name__)
        self.graphs.append(graph)
        return lambda *args: _Interpreter(graph).run(*map(_widened, args))

    def ops(self) -> list[str]:
        """The operators of the one graph."""
        (graph,) = self.graphs
        return [ir.op_name(n).removeprefix("aten::") for n in graph.graph.nodes if ir.is_op(n)]


class _Interpreter(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        return _widened(result) if n.op == "get_attr" else result

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        wide = map_aggregate(
            (args, kwargs), lambda a: torch.float64 if any(a is f for f in FLOATS) else a
        )
        if target is aten.to.dtype:  # between equal dtypes it would return its operand
            return aten._to_copy.default(wide[0][0], dtype=wide[0][1])
        return super().call_function(target, *wide)  # type: ignore[misc]


def _widened(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.dtype in FLOATS else value


def results(program: Any, inputs: Sequence[Any], backend: Any, **options: Any) -> dict[str, Any]:
    """Outputs (FP64) and gradients (FP32) of a program under a backend, by name."""
    own = [
        x.detach().clone().requires_grad_(x.is_floating_point()) if torch.is_tensor(x) else x
        for x in inputs
    ]
    for parameter in program.parameters() if isinstance(program, nn.Module) else ():
        parameter.grad = None
    torch.manual_seed(0)
    compiled = torch.compile(program, backend=backend, fullgraph=True, **options)
    outputs = compiled(*own)
    outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    torch.autograd.backward([weighted_sum(o) for o in outputs if o.requires_grad])
    found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    found |= {f"input {i}": x.grad for i, x in enumerate(own) if torch.is_tensor(x)}
    if isinstance(program, nn.Module):
        found |= {name: p.grad for name, p in program.named_parameters()}
    return found


def assert_exact(
    program: Any, *inputs: Any, level: str = "O1", pad: str = "always", **options: Any
) -> InFP64:
    """Assert that padding changes no number, dtype or layout of what a program computes."""
    torch._dynamo.reset()
    padded = InFP64(pad, level)
    wanted = results(program, inputs, InFP64("never", level), **options)
    torch._dynamo.reset()
    actual = results(program, inputs, padded, **options)
    assert actual.keys() == wanted.keys()
    sizes = {name: _largest(value) for name, value in wanted.items() if value is not None}
    rounding = 1e-14 * max(sizes.values())  # all that is left of a gradient that ought to be zero
    for name, value in wanted.items():
        if value is None:
            assert actual[name] is None, name
            continue
        assert _layout(actual[name]) == _layout(value), name
        tolerance = 1e-11 if name.startswith("output") else 1e-5
        torch.testing.assert_close(
            actual[name],
            value,
            rtol=tolerance,
            atol=max(tolerance * sizes[name], rounding),
            msg=lambda m, n=name: f"{n}: {m}",
        )
    return padded


def _largest(value: torch.Tensor) -> float:
    return value.abs().max().item() if value.numel() else 0.0


def _layout(value: torch.Tensor) -> list[int]:
    """The strides that say where an element lies: those of dimensions longer than 1."""
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
