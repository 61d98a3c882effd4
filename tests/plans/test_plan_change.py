"""What a plan advises for a node, followed to the letter, changes that node; or nothing can."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_calls import Calls, X
from torch import nn

from mpcompile import Policy, compiled_plans, mpcompile, plan_for
from mpcompile.ir import By, Role
from mpcompile.plans import Plan, PlanNode

Body = Callable[[nn.Linear, torch.Tensor], Any]


def planned(body: Body, **options: Any) -> Plan:
    return plan_for(Calls(body), X, device="t4", **options)


def node_of(plan: Any, name: str) -> PlanNode:
    return next(node for node in plan.nodes if node.name == name)


def decision(node: PlanNode) -> tuple[str, str, str]:
    return node.precision, node.rule, node.planned


def advised(node: PlanNode) -> list[Policy]:
    """The policies that a node's advice spells out."""
    found = re.findall(r"Policy\(\w+=(?:\{[^}]*\}|\[[^\]]*\])\)", node.change)
    return [eval(text, {"Policy": Policy}) for text in found]


# -- the bodies ------------------------------------------------------------------------------------


def without_autocast(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", enabled=False):
        return f(x)


def shares_memory(f: nn.Linear, x: torch.Tensor) -> Any:
    h = f(x)
    return h, h.view(-1)


def updates(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        f.weight.sub_(0.1 * torch.mm(x.T[:, :3], x))
    return f(x)


def attends(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return f(x).softmax(-1) @ f.weight


def overlaps(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return f(x).unfold(1, 2, 1)


def in_double(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return f(x).double().exp()


def inverts(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.inv(f(x) @ f(x).T)


def tiny(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return f(f(x) * 1e-9)  # the constant is no FP16 number


# -- a policy changes it ---------------------------------------------------------------------------

POLICIES: dict[str, tuple[Body, str, str]] = {
    "table": (lambda f, x: f(x), "linear", "LOW"),
    "table, FP32": (lambda f, x: f(x).softmax(-1), "softmax", "FULL"),
    "plan": (lambda f, x: f(f(x).relu()), "relu", "LOW"),
    "region": (without_autocast, "linear", "KEEP"),
    "guard": (tiny, "mul", "FULL"),
}


@pytest.mark.parametrize("case", POLICIES)
def test_the_policy_it_names_changes_it(case: str) -> None:
    body, name, precision = POLICIES[case]
    node = node_of(planned(body), name)
    assert (node.rule, node.precision) == (case.split(",")[0], precision)
    policies = advised(node)
    assert len(policies) == (1 if node.rule in ("region", "guard") else 2)
    for policy in policies:
        changed = node_of(planned(body, policy=policy), name)
        other = "FULL" if precision == "LOW" else "LOW"
        assert (changed.precision, changed.rule) == (other, "policy")
        assert changed.planned != node.planned


def test_ones_own_policy_can_be_removed() -> None:
    body, name, _ = POLICIES["table"]
    node = node_of(planned(body, policy=Policy(full=["linear"])), name)
    assert node.rule == "policy"
    assert "your own policy" in node.change
    assert "remove" in node.change
    assert node_of(planned(body), name).precision != node.precision


def test_an_alias_goes_with_a_clone() -> None:
    """The policy that is warned of leaves the whole graph in FP32."""
    node = node_of(planned(shares_memory), "view")
    assert (node.rule, node.precision) == ("alias", "FULL")
    assert node.change.startswith("return a .clone()")
    apart = planned(lambda f, x: (lambda h: (h, h.view(-1).clone()))(f(x)))
    assert node_of(apart, "view").precision == "LOW"
    (policy,) = advised(node)
    assert len(planned(shares_memory, policy=policy).left) == 1


# -- no policy changes it --------------------------------------------------------------------------

FIXED: dict[str, tuple[Body, str]] = {"captured": (in_double, "exp"), "update": (updates, "mm")}


@pytest.mark.parametrize("rule", FIXED)
def test_no_policy_changes_it(rule: str) -> None:
    body, name = FIXED[rule]
    in_bf16 = {"dtype": torch.bfloat16}  # in FP16 the update would keep the whole graph in FP32
    node = node_of(planned(body, **in_bf16), name)
    assert node.rule == rule
    assert "no policy changes it" in node.change
    for word in ("low", "fp32", "keep"):
        assert node_of(planned(body, policy=Policy(nodes={name: word}), **in_bf16), name) == node


def test_an_operator_that_refuses_low_operands() -> None:
    low = Policy(nodes={"linalg_inv": "low"})
    node = node_of(planned(inverts, policy=low), "linalg_inv")
    assert (node.rule, node.precision) == ("kernel", "FULL")
    assert node.change.startswith("no policy helps")


def test_an_operator_without_a_kernel_fails_if_it_is_forced() -> None:
    """`rrelu` between two products would run low; the CPU has no FP16 kernel for it."""

    def model(**options: Any) -> Any:
        body = lambda f, x: f(F.rrelu(f(x), training=True))  # noqa: E731
        return mpcompile(Calls(body), dtype=torch.float16, emit="eager", **options)

    compiled = model()
    compiled(X)
    node = node_of(compiled_plans(compiled)[0], "rrelu")
    assert node.rule == "kernel"
    assert node.change.startswith("no policy helps, since the device can't run it")
    with pytest.raises(RuntimeError, match="not implemented for 'Half'"):
        model(policy=Policy(nodes={"rrelu": "low"}))(X)


def test_a_dtype_that_the_program_names() -> None:
    body: Body = lambda f, x: f(x).float() + torch.rand(4)  # noqa: E731
    plan = planned(body)
    for name in ("to", "rand"):
        node = node_of(plan, name)
        assert (node.rule, node.precision) == ("table", "KEEP")
        assert "stands in your program" in node.change
        forced = node_of(planned(body, policy=Policy(nodes={name: "low"})), name)
        assert forced.planned == node.planned == f"f32[{'3, 4' if name == 'to' else 4}]"
    changed = planned(lambda f, x: f(x).to(torch.float64) + torch.rand(4, dtype=torch.float64))
    assert [node_of(changed, name).planned[:3] for name in ("to", "rand")] == ["f64", "f64"]


def test_a_part_of_a_result_follows_the_operator() -> None:
    body: Body = lambda f, x: f(x).chunk(2, -1)[0].exp()  # noqa: E731
    node = node_of(planned(body), "getitem")
    assert "part of the result of chunk" in node.change
    itself, whole = (
        node_of(planned(body, policy=Policy(nodes={name: "fp32"})), "getitem").planned
        for name in ("getitem", "chunk")
    )
    assert itself == node.planned == "f16[3, 2]"
    assert whole == "f32[3, 2]"


# -- what passes make ------------------------------------------------------------------------------


def head(f: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    logits = f(x.reshape(1, 3, 4)).view(3, 4)
    return F.cross_entropy(logits, torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize(
    ("body", "options", "names", "name"),
    [
        (attends, {"level": "O2"}, ["softmax_low"], "softmax"),
        (head, {"fuse_head": True}, ["linear_rows", "linear_loss"], "linear"),
    ],
)
def test_a_rewriting_pass_can_be_disabled(
    body: Body, options: dict[str, Any], names: list[str], name: str
) -> None:
    plan = planned(body, **options)
    nodes = [node for node in plan.nodes if node.rule == "rewrite"]
    assert [node.name for node in nodes] == names
    for node in nodes:
        (disabled,) = re.findall(r"disable_passes=\['(\w+)'\]", node.change)
        back = planned(body, disable_passes=[disabled], **options)
        assert "rewrite" not in [n.rule for n in back.nodes]
    (policy, _) = advised(node_of(back, name))
    again = planned(body, disable_passes=[disabled], policy=policy, **options)
    assert node_of(again, name).rule == "policy"


def test_a_cast_goes_with_the_precision_of_its_reader() -> None:
    body, _, _ = POLICIES["table"]
    cast = node_of(planned(body), "args_0_f16")
    assert cast.rule == "cast"
    assert "it follows from its two ends (linear reads f16)" in cast.change
    full = planned(body, policy=Policy(nodes={"linear": "fp32"}))
    assert "args_0_f16" not in [node.name for node in full.nodes]


def test_loss_scaling_can_be_left_out() -> None:
    def rules(**options: Any) -> set[str]:
        model = mpcompile(nn.Linear(4, 4), dtype=torch.float16, emit="eager", **options)
        model(X)
        found = compiled_plans(model)[0].nodes
        assert all("loss_scale='none'" in node.change for node in found if node.rule == "scale")
        return {node.rule for node in found}

    assert "scale" in rules()
    assert "scale" not in rules(loss_scale="none")


def test_pads_can_be_left_out() -> None:
    def pads(width: int, **options: Any) -> list[PlanNode]:
        plan = plan_for(nn.Linear(width, 64), torch.ones(64, width), device="t4", **options)
        return [node for node in plan.nodes if node.rule == "pad"]

    found = pads(61, pad="always")
    assert found
    assert all("pad='never'" in node.change for node in found)
    assert not pads(61, pad="never")
    assert not pads(64, pad="always")


def test_a_copy_goes_if_the_model_copies() -> None:
    node = node_of(planned(overlaps), "unfold_copy")
    assert (node.rule, ".contiguous()" in node.change) == ("copy", True)
    own = planned(lambda f, x: overlaps(f, x).contiguous())
    assert "copy" not in [n.rule for n in own.nodes]


def test_every_word_has_a_sentence() -> None:
    """Also for a rule of a newer version."""
    words = {by.value for by in By} | {role.value for role in Role if role is not Role.PROGRAM}
    node = PlanNode("a", "aten::a", "", "", "f32[]", "f32[]", "KEEP", "", "why")
    known = {word: PlanNode(**{**vars(node), "rule": word}).change for word in words}
    unknown = "can't tell"
    assert not [word for word, sentence in known.items() if unknown in sentence]
    assert unknown in PlanNode(**{**vars(node), "rule": "moon"}).change
