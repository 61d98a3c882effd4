"""joint: which passes run on the joint graph, how Inductor runs them, what its caches know."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import leaf
from torch import fx, nn
from torch._functorch.partitioners import default_partition
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import CustomGraphPass, CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile import mpcompile
from mpcompile.capture.capture import capture
from mpcompile.capture.surroundings import around_now
from mpcompile.devices.cpu import CPU
from mpcompile.devices.torch_faults import ZEROS_ARE_REUSED
from mpcompile.lower import joint
from mpcompile.lower.emitter import emit
from mpcompile.lower.joint import (
    LOWERED,
    NO_PASSES,
    OPTION,
    PARTITIONER,
    InOrder,
    JointPass,
    JointPasses,
    joint_passes,
    with_joint_passes,
)
from mpcompile.lower.part_step import PartStep
from mpcompile.passes.joint.keep_normalized import keep_normalized
from mpcompile.passes.joint.kept_for_backward import (
    keep_sources,
    keep_written_inputs,
    store_masks_as_bytes,
)
from mpcompile.passes.joint.lay_images import lay_channels_last, lay_low_images
from mpcompile.passes.joint.lowered_faults import fill_zeros, read_low_results, scatter_into_sums
from mpcompile.passes.joint.together import cast_together, unscale_together
from mpcompile.passes.joint.widen_weight_gradients import widen_weight_gradients
from mpcompile.rules.policy import Level
from mpcompile.torch_inside import names
from mpcompile.torch_inside.inductor import PRE_FUSION

pytestmark = pytest.mark.inside

ANYWHERE = (read_low_results, scatter_into_sums)
LOWERED_ON_CUDA = (lay_low_images, cast_together, unscale_together, *ANYWHERE)
IMAGES = JointPasses(lowered=(lay_low_images,))
CHECKS = JointPasses(parting=(keep_normalized,), lowered=LOWERED_ON_CUDA[1:], keeps_casts=True)
OURS = JointPasses(joint=(widen_weight_gradients,))
WITHOUT_GEMMS = JointPasses(parting=(keep_normalized,), lowered=LOWERED_ON_CUDA, keeps_casts=True)
ON_CUDA = replace(WITHOUT_GEMMS, joint=OURS.joint)
ON_CPU = JointPasses(halves=(store_masks_as_bytes,), lowered=ANYWHERE, recomputes=True)
ZEROS = (fill_zeros,) if ZEROS_ARE_REUSED.is_here() else ()
counters = torch._dynamo.utils.counters


class Theirs(CustomGraphPass):
    """A user's pass, which notes that it ran."""

    def __init__(self, uuid: Any = "theirs", log: list[str] | None = None) -> None:
        self.name, self.log = uuid, [] if log is None else log

    def __call__(self, graph: fx.Graph) -> None:
        self.log.append(str(self.name))

    def uuid(self) -> Any:
        return self.name


def passes_for(device: str = "cuda", level: Level = Level.O1, **more: bool) -> JointPasses:
    return joint_passes(level, torch.device(device), **more)


def one(options: dict[str, Any] | None = None, passes: JointPasses = OURS) -> Any:
    """The pass that Inductor is given."""
    given = with_joint_passes(options, passes)
    return given[OPTION]


# -- which passes, and when ------------------------------------------------------------------------


def test_on_cuda_below_o2_and_on_a_cpu_at_every_level() -> None:
    for level in (Level.O1, Level.O2, Level.O3):
        assert passes_for(level=level) == (ON_CUDA if level is Level.O1 else WITHOUT_GEMMS)
        assert passes_for("cpu", level) == ON_CPU


def test_whole_steps_have_one_more_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"cpu": (lay_channels_last,), "cuda": (lay_low_images, cast_together)}
    for level, device in ((level, device) for level in Level for device in own):
        lowered = joint_passes(level, torch.device(device), whole=True).lowered
        assert lowered == (*ZEROS, *own[device], *ANYWHERE)
    monkeypatch.setattr(CPU, "convolves_channels_last", False)
    assert passes_for("cpu", whole=True).lowered == (*ZEROS, *ANYWHERE)


@pytest.mark.parametrize(
    ("device", "asked", "keeps_casts", "recomputes"),
    [
        ("cuda", {}, True, False),
        ("cuda", {"recompute": True}, False, True),
        ("cuda", {"sharded": True}, False, False),
        ("cpu", {}, False, True),
    ],
)
def test_operands_and_casts_are_made_again_on_a_cpu_and_where_memory_is_asked_for(
    device: str, asked: dict[str, Any], keeps_casts: bool, recomputes: bool
) -> None:
    passes = joint_passes(Level.O1, torch.device(device), **asked)
    assert (passes.keeps_casts, passes.recomputes) == (keeps_casts, recomputes)


@pytest.mark.parametrize("more", [{"keeps_casts": True}, {"recomputes": True}])
@pytest.mark.parametrize("whole", [False, True])
def test_caches_know_what_is_kept(more: dict[str, bool], whole: bool) -> None:
    known = JointPasses(halves=ON_CPU.halves, whole=whole)
    given = (with_joint_passes(None, passes) for passes in (known, replace(known, **more)))
    one, other = (options[OPTION if whole else PARTITIONER].uuid() for options in given if options)
    assert one != other


def test_not_where_torch_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert passes_for() == CHECKS
    monkeypatch.undo()
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert passes_for() == WITHOUT_GEMMS
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False


def test_no_layouts_where_inductor_may_choose_none() -> None:
    assert with_joint_passes({"layout_optimization": False}, IMAGES) == {
        "layout_optimization": False
    }
    with inductor.patch(layout_optimization=False):
        assert with_joint_passes(None, IMAGES) is None
    given = with_joint_passes(None, IMAGES)
    assert ([*given[LOWERED].theirs], given[LOWERED].ours) == ([], [lay_low_images])


def test_without_passes_options_are_the_users() -> None:
    assert with_joint_passes(None, NO_PASSES) is None
    assert with_joint_passes({}, NO_PASSES) is None
    theirs = Theirs()
    assert with_joint_passes({OPTION: theirs, "epilogue-fusion": False}, NO_PASSES) == {
        OPTION: theirs, "epilogue_fusion": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"cpp_wrapper": True}, {"max_autotune_gemm_backends": "TRITON,CUTLASS"}], ids=str
)
def test_code_that_cannot_call_it_is_left_alone(options: dict[str, Any]) -> None:
    passes = JointPasses(joint=OURS.joint)
    assert with_joint_passes(options, passes) == options
    with inductor.patch(**options):
        assert with_joint_passes(None, passes) is None


def test_no_operator_of_ours_in_a_wrapper_in_cpp() -> None:
    given = with_joint_passes({"cpp_wrapper": True}, CHECKS) or {}
    assert given[LOWERED].ours == [*ANYWHERE]
    assert LOWERED in (with_joint_passes(None, CHECKS) or {})


def test_the_backend_hands_them_to_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    wrapper = names.InductorBackend

    def spy(mode: Any, options: Any, dynamic: Any) -> Any:
        seen.append(options)
        return wrapper(mode, options, dynamic)

    monkeypatch.setattr(names, "InductorBackend", spy)
    mpcompile(nn.Linear(4, 4))(torch.randn(2, 4))
    assert len(seen) == 1
    assert seen[0].keys() <= {PARTITIONER, PRE_FUSION, LOWERED}
    given = seen[0][PARTITIONER]
    assert given.passes.halves == (keep_sources, keep_written_inputs, *ON_CPU.halves)


# -- with a pass of the user's own -----------------------------------------------------------------


@pytest.mark.parametrize("spelling", [OPTION, OPTION.replace("_", "-"), LOWERED])
@pytest.mark.parametrize("several", [False, True])
def test_the_users_pass_runs_first(spelling: str, several: bool) -> None:
    log: list[str] = []

    def ours(graph: fx.Graph) -> bool:
        log.append("ours")
        return False

    theirs = Theirs(log=log)
    options = {spelling: [theirs, Theirs("second", log)] if several else theirs}
    given = with_joint_passes(options, JointPasses(joint=(ours,), lowered=(ours,)))
    given[spelling.replace("-", "_")](fx.Graph())
    assert log == ["theirs", "second", "ours"] if several else ["theirs", "ours"]


def test_a_pass_set_for_all_of_inductor_runs_too() -> None:
    theirs = Theirs()
    with inductor.patch({OPTION: theirs}):
        both = one()
        assert getattr(inductor, OPTION) is theirs
    both(fx.Graph())
    assert theirs.log == ["theirs"]
    assert both.uuid() == one({OPTION: Theirs()}).uuid()


class Partitioner(CustomPartitionerFn):
    """A user's partitioner, which keeps as much as autograd would, and notes that it ran."""

    def __init__(self, uuid: Any = "theirs") -> None:
        self.name, self.calls = uuid, 0

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **kw: Any) -> Any:
        self.calls += 1
        kw.pop("compiler")
        return default_partition(gm, joint_inputs, **kw)

    def uuid(self) -> Any:
        return self.name


@pytest.mark.slow("compiles by Inductor, or a deep model")
@pytest.mark.parametrize("everywhere", [False, True])
def test_the_users_partitioner_is_called(everywhere: bool) -> None:
    theirs = Partitioner(None)  # don't cache
    with inductor.patch({PARTITIONER: theirs} if everywhere else {}):
        options = None if everywhere else {PARTITIONER: theirs}
        model = mpcompile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), options=options)
        model(torch.randn(4, 8)).sum().backward()
    assert theirs.calls == 1


# -- uuids and caches ------------------------------------------------------------------------------


def test_uuid_holds_every_pass() -> None:
    alone, both, other = one(), one({OPTION: Theirs()}), one({OPTION: Theirs("other")})
    assert alone.uuid() == one().uuid()
    assert len({alone.uuid(), both.uuid(), other.uuid()}) == 3


def test_uuid_holds_the_partitioner() -> None:
    given = [{PARTITIONER: Partitioner(name)} for name in ("a", "b", None)]
    a, b, none = (with_joint_passes(x, ON_CPU)[PARTITIONER].uuid() for x in given)  # type: ignore[index]
    assert len({a, b, with_joint_passes(None, ON_CPU)[PARTITIONER].uuid()}) == 3  # type: ignore[index]
    assert none not in (a, b)


def test_a_pass_that_cannot_be_cached_says_so_for_all() -> None:
    assert one({OPTION: Theirs(None)}).uuid() is None
    assert one({OPTION: lambda graph: None}).uuid() is None


def test_uuid_is_the_source(tmp_path: Path) -> None:
    def pass_of(name: str, source: str) -> JointPass:
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.pass_  # type: ignore[no-any-return]

    source = "def pass_(graph):\n    return False\n"
    first, same, changed = (
        InOrder((), [pass_of(name, text)]).uuid()
        for name, text in (("a", source), ("b", source), ("c", source + "# better\n"))
    )
    assert first == same != changed


@pytest.mark.slow("compiles by Inductor, or a deep model")
def test_caches_know_the_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def compile_with(joint: JointPasses, options: dict[str, Any] | None) -> str:
        def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            captured = capture(gm, inputs, around_now(gm, inputs))
            return emit(captured, inputs, "inductor", joint=joint, options=options)

        torch._dynamo.reset()
        counters.clear()
        x = torch.randn(3, 4, requires_grad=True)
        torch.compile(lambda x: x.sin(), backend=backend)(x).sum().backward()
        known = [f"autograd_cache_{outcome}" for outcome in ("hit", "miss", "bypass")]
        (outcome,) = counters["aot_autograd"].keys() & known
        return outcome.removeprefix("autograd_cache_")

    assert compile_with(NO_PASSES, None) == "miss"
    assert compile_with(OURS, None) == "miss"
    assert compile_with(OURS, None) == "hit"
    assert compile_with(OURS, {OPTION: Theirs()}) == "miss"
    assert compile_with(OURS, {OPTION: Theirs()}) == "hit"
    assert compile_with(OURS, {OPTION: lambda graph: None}) == "bypass"
    assert compile_with(ON_CPU, None) == "miss"
    assert compile_with(ON_CPU, None) == "hit"
    assert compile_with(NO_PASSES, None) == "hit"


# -- the thing itself ------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
@pytest.mark.parametrize("loss_scale", ["none", 128.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_beyond_fp16(dtype: torch.dtype, loss_scale: Any) -> None:
    """Sums over a batch so large that FP16 can't hold them, and that are no value of BF16."""
    net = nn.Linear(24, 16, device="cuda")
    x = (torch.rand(2**17, 24, device="cuda") + 0.5).to(dtype).float()
    exact = x.double().sum(0).expand(16, 24)
    assert exact.min() > torch.finfo(torch.float16).max
    fast = mpcompile(net, dtype=dtype, level="O1", loss_scale=loss_scale)
    fast(x).sum().backward()
    weight, bias = net.weight.grad, net.bias.grad
    # Tensor Cores cut off what an FP32 sum can't hold, at each of its 2**13 steps
    torch.testing.assert_close(weight.double(), exact, rtol=1e-3, atol=0)
    assert (weight != weight.to(dtype)).any()
    torch.testing.assert_close(bias, torch.full((16,), 2.0**17, device="cuda"))


# -- a whole step, parted --------------------------------------------------------------------------


def backward(x: Any, w: Any, v: Any) -> Any:
    loss = ((x @ w).cos() @ v).square().mean()
    first = torch.ops.mpcompile.begin_backward(loss.detach())
    return loss.detach(), *torch.autograd.grad(loss, (w, v), first)


def usual(x: Any, w: Any, v: Any, total: Any) -> Any:
    loss, first, second = backward(x, w, v)
    with torch.no_grad():
        new, losses = w - 0.1 * first, total + loss
        total.copy_(losses)
        w.copy_(new)
    return loss, second, x


def of_two(x: Any, w: Any, v: Any, total: Any) -> Any:
    """The second forward comes after the first backward."""
    return *backward(x, w, v), *backward(x, w, v), total


def of_slopes(x: Any, w: Any, v: Any, total: Any) -> Any:
    (slope,) = torch.autograd.grad(((x @ w).cos() @ v).sum(), x, create_graph=True)
    return *backward(slope, w, v), total


def of_noise(x: Any, w: Any, v: Any, total: Any) -> Any:
    """Torch's partitioner would take one draw for the other."""
    return *backward(x, w, v), total + 0 * (torch.randn_like(w) - torch.randn_like(w)).sum()


@pytest.mark.parametrize(
    ("step", "again", "times"),
    [(usual, True, 2), (usual, False, 1), (of_two, True, 2), (of_slopes, True, 3),
     (of_noise, True, 1)],
)  # fmt: skip
def test_a_step_computes_again_what_pieces_do(step: Any, again: bool, times: int) -> None:
    given = leaf(8, 4), leaf(4, 6), leaf(6, 4), torch.zeros(())
    gm = make_fx(step, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    assert PartStep(joint.Partitioner(None, JointPasses(recomputes=again)))(gm.graph)
    gm.graph.lint()
    gm.recompile()
    calls = [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]
    assert calls.count("aten.cos.default") == times
    assert not any("mpcompile" in call for call in calls)
    assert "aten.copy_.default" not in calls[: len(calls) - calls.count("aten.copy_.default")]
    own = [tensor.detach().clone() for tensor in given]
    wanted = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in given]
    for one, right in zip([*gm(*own), *own], [*step(*wanted), *wanted], strict=True):
        torch.testing.assert_close(one, right, rtol=1e-6, atol=1e-7)
