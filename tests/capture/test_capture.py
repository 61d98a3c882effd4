"""capture: what the passes get to see, and that one compilation serves many shapes."""

import pytest
import torch
import torch.nn.functional as F
from compare import LEVELS, SETTINGS, assert_near, check, leaf, weighted_sum
from graphs import captured
from module_of import module_of
from torch import fx, nn

from mpcompile import ir
from mpcompile.capture.surroundings import around_now
from mpcompile.errors import CannotRewrite

pytestmark = pytest.mark.inside


def by_op(gm: fx.GraphModule) -> dict[str, fx.Node]:
    return {ir.op_name(n).removeprefix("aten::"): n for n in gm.graph.nodes if ir.is_op(n)}


def test_module_path_and_source_line_survive() -> None:
    layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.GELU())])
    net = module_of(lambda m, x: m.layers[0](x) * 2, layers=layers)  # the line sought below
    nodes = by_op(captured(net, torch.randn(2, 4)))
    assert ir.module_path(nodes["linear"]) == "layers.0.0"
    assert ir.module_path(nodes["gelu"]) == "layers.0.1"
    with open(__file__, encoding="utf-8") as file:
        line = next(i for i, text in enumerate(file, 1) if "# the line sought below" in text)
    assert ir.source(nodes["mul"]) == f"test_capture.py:{line}"


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_modes_are_noted_on_nodes() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        with torch.no_grad():
            b = x.cos()
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            c = x.tanh()
        with torch.autocast("cuda", torch.float16):  # not this graph's device
            d = x.exp()
        return a + b + c + d

    nodes = by_op(captured(program, leaf(3)))
    assert [ir.grad_enabled(nodes[n]) for n in ("sin", "cos", "tanh")] == [True, False, True]
    regions = [ir.autocast_region(nodes[n]) for n in ("sin", "tanh", "exp", "add")]
    assert regions == [None, (False, None), None, None]
    assert "_enter_autocast" not in ir.render(nodes["sin"].graph)


def test_dead_code_goes_and_writes_stay() -> None:
    def program(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        x.sin()
        state.add_(1)
        torch.rand(3)  # moves the random stream
        return x.cos()

    assert list(by_op(captured(program, leaf(3), torch.zeros(3)))) == ["add_", "rand", "cos"]


def test_nested_compile_region_is_inlined() -> None:
    @torch.compiler.nested_compile_region
    def block(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w))

    result = check(lambda x, w: block(block(x, w), w), leaf(8, 16), leaf(16, 16), low=["linear"])
    assert result.ops("LOW").count("linear") == 2


def test_a_graph_that_is_not_dynamos() -> None:
    gm = fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(CannotRewrite, match="does not come from Dynamo"):
        around_now(gm, [torch.ones(2)])


class Net(nn.Module):
    """Uses its sizes: in views, as numbers, as bounds of slices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(50, 16), nn.Linear(16, 48), nn.Linear(16, 50)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("position", torch.randn(64, 16))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, time = tokens.shape
        x = self.embed(tokens) + self.position[:time]
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, 2, 8).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + h.transpose(1, 2).reshape(batch, time, 16) / time**0.5
        return self.out(x)


@pytest.mark.slow_rows("compiles many graphs")
@SETTINGS
def test_one_compilation_for_all_sizes(level: str, emit: str) -> None:
    tokens = torch.randint(50, (3, 7))
    result = check(Net(), tokens, level=level, emit=emit, dynamic=True, low=["linear"])
    sizes = [(3, 12), (5, 7), (2, 33)]
    for size in sizes:
        tokens = torch.randint(50, size)
        grads = []
        for model in (result.reference, result.model):
            model.zero_grad()
            out = model(tokens)
            weighted_sum(out).backward()
            grads.append([out, *(p.grad for p in model.parameters())])
        for expected, actual in zip(*grads, strict=True):
            assert_near(actual, expected, f"at {size}", 1e-2)
    assert len(result.plans) == 1
    assert any("s" in node.planned for node in result.plans[0].nodes)


@LEVELS
def test_sizes_that_change_without_notice(level: str) -> None:
    """Dynamo's default: the second size makes the dimension symbolic, the third is free."""
    result = check(Net(), torch.randint(50, (3, 7)), level=level)
    for size in [(3, 9), (3, 11), (3, 13)]:
        result.model(torch.randint(50, size)).sum().backward()
    assert len(result.plans) == 2


@LEVELS
def test_numbers_as_inputs(level: str) -> None:
    def program(x: torch.Tensor, w: torch.Tensor, n: int, factor: float) -> torch.Tensor:
        return F.linear(x[:, :n], w[:, :n]) * factor + n

    result = check(program, leaf(8, 16), leaf(16, 16), 5, 0.5, level=level, dynamic=True)
    x, w = torch.randn(8, 16), torch.randn(16, 16)
    assert_near(result.model(x, w, 7, 0.25), program(x, w, 7, 0.25), "output", 1e-2)


@LEVELS
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 1), (0, 16), (5, 123)])
def test_odd_shapes(shape: tuple[int, int], level: str) -> None:
    model = nn.Sequential(nn.Linear(shape[1], 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 1))
    check(model, leaf(*shape), level=level, low=["linear"])


@LEVELS
def test_sizes_that_depend_on_data(level: str) -> None:
    """`nonzero` under capture_dynamic_output_shape_ops: sizes nobody knows before the run."""

    def program(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, w)
        return F.linear(h[mask.nonzero().squeeze(-1)], w).mean(0)

    mask = torch.arange(8) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(program, leaf(8, 16), leaf(16, 16), mask, level=level, low=["linear"])


@LEVELS
def test_input_that_nothing_uses(level: str) -> None:
    """Its gradient is None, as in eager."""

    def program(x: torch.Tensor, w: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        _ = unused * 2
        return F.linear(x, w)

    check(program, leaf(8, 16), leaf(16, 16), leaf(3), level=level, emit="aot_eager")
