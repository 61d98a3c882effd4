"""emit: what comes out computes what the graph says, whatever compiles it."""

import json

import pytest
import torch
from miniature import HOWS, Net, compiled, leaf, results_and_grads
from module_of import function_of
from processes import python
from repository import SUPPORT
from torch import fx

from mpcompile.errors import MPCompileError
from mpcompile.ir.second_backward import noticed

pytestmark = [pytest.mark.inside, pytest.mark.usefixtures("own_inductor_cache", "rnns_in_graphs")]


# -- forward and backward --------------------------------------------------------------------------


@pytest.mark.slow("compiles by Inductor")
@pytest.mark.parametrize("how", HOWS)
def test_ambient_autocast_changes_nothing(how: str) -> None:
    net = Net()
    fast = compiled(net, how)
    x = leaf(5, 6)
    expected = results_and_grads(net, [x], list(net.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        if how == "eager":  # its backward is autograd's own, and at autocast's mercy
            torch.testing.assert_close(list(fast(x)), expected[:2])
            return
        actual = results_and_grads(fast, [x], list(net.parameters()))
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e)


@pytest.mark.slow("compiles by Inductor")
def test_options_reach_inductor_and_go_over_the_mode() -> None:
    seen: list[tuple[bool, bool]] = []

    def watch(graph: fx.Graph) -> None:
        config = torch._inductor.config
        seen.append((config.coordinate_descent_tuning, config.epilogue_fusion))

    options = {"coordinate_descent_tuning": False, "epilogue_fusion": False,
               "post_grad_custom_pre_pass": watch}  # fmt: skip
    fast = compiled(
        lambda x: x.sin() * 2, "inductor", mode="max-autotune-no-cudagraphs", options=options
    )
    fast(leaf(4)).sum().backward()
    assert seen == [(False, False)] * 2  # forward and backward


# -- caches ---------------------------------------------------------------------------------------

CHILD = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import miniature as t

report = {}
for model, shapes in (("plain", "dynamic"), ("rnn", "static")):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net = t.Recurrent(t.nn.LSTM, {}) if model == "rnn" else t.Net()
    x = t.leaf(7, 3, 4) if model == "rnn" else t.leaf(5, 6)
    low = t.rnns_in(torch.bfloat16)
    with torch._dynamo.config.patch(allow_rnn=True):
        fast = t.compiled(net, "inductor", low, dynamic=shapes == "dynamic")
        values = t.results_and_grads(fast, [x], list(net.parameters()))
    report[f"{model} {shapes}"] = {
        **{k: dict(torch._dynamo.utils.counters[k]) for k in ("aot_autograd", "inductor")},
        "sum": float(sum(v.double().abs().sum() for v in values)),
    }
print(json.dumps(report))
"""


@pytest.mark.slow("compiles by Inductor")
def test_caches_hit_in_a_second_process() -> None:
    cold, warm = (json.loads(python("-c", CHILD, str(SUPPORT)).stdout) for _ in range(2))
    for case, graphs in (("plain dynamic", 1), ("rnn static", 2)):
        for run in cold[case], warm[case]:
            assert "autograd_cache_bypass" not in run["aot_autograd"]
            assert "fxgraph_cache_bypass" not in run["inductor"]
        assert warm[case]["aot_autograd"]["autograd_cache_hit"] == graphs
        # dynamic: Dynamo starts over once it has learnt which floats are constants
        misses = warm[case]["aot_autograd"].get("autograd_cache_miss", 0)
        assert misses <= case.endswith("dynamic")
        assert "fxgraph_cache_miss" not in warm[case]["inductor"]
        assert warm[case]["sum"] == cold[case]["sum"]


# -- a second backward ----------------------------------------------------------------------------


def test_gradients_of_a_graph_are_differentiated_by_nobody() -> None:
    """Though they come out as constants; without create_graph they stay constants."""
    Constant = function_of(lambda ctx, x: x.square(), lambda ctx, grad: torch.full_like(grad, 3.0))

    run = noticed(lambda x: (Constant.apply(x),))  # type: ignore[no-untyped-call]
    x = torch.ones(4, requires_grad=True)
    (once,) = torch.autograd.grad(run(x)[0].sum(), x)
    assert not once.requires_grad
    (gradient,) = torch.autograd.grad(run(x)[0].sum(), x, create_graph=True)
    torch.testing.assert_close(gradient, once)
    with pytest.raises(MPCompileError, match="gradient penalty"):
        gradient.sum().backward()


def test_an_input_that_a_graph_returns_keeps_its_own_history() -> None:
    """What stands before a compiled graph may be differentiated as often as one likes: in each
    call, and if the first was of an evaluation, in which nothing has a history.
    """
    x = torch.ones(4, requires_grad=True)
    run = noticed(lambda h: (h,))
    with torch.no_grad():
        run(x.pow(3))
    for _ in range(2):
        (returned,) = run(x.pow(3))
        (gradient,) = torch.autograd.grad(returned.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        torch.testing.assert_close(second, 6 * x)
