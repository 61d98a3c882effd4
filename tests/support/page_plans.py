"""Plans of whole models whose pages are tested and pictured."""

import dataclasses
import functools

import torch
from reports import EVIL as EVIL
from torch import nn

from benchmarks.models import resnet18
from mpcompile import Policy, compiled_plans, mpcompile, plan_for
from mpcompile.demo.gpt import GPT, GPTConfig
from mpcompile.planner.graph_plan import GraphPlan
from mpcompile.planner.partitioned import BackwardNode
from mpcompile.planner.plan_data import ModuleLine
from mpcompile.plans.model_plan import Plan


@functools.cache
def gpt_plan() -> Plan:
    """The demo's GPT, with its softmaxes written out as on a CPU, and a backward."""
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    gpt = GPT(GPTConfig())
    modules = tuple(ModuleLine(path, type(m).__name__) for path, m in gpt.named_modules())
    model = mpcompile(gpt, dtype=torch.bfloat16, emit="eager")
    model(tokens, tokens)
    graphs = tuple(with_backward(graph) for graph in compiled_plans(model))
    return Plan("GPT", "O1", "bfloat16", "cpu", graphs, modules, {"torch": torch.__version__})


@functools.cache
def resnet_plan() -> Plan:
    """ResNet-18 in FP16 on a T4."""
    images, targets = torch.zeros(2, 3, 224, 224), torch.zeros(2, dtype=torch.int64)
    plan = plan_for(resnet18(), images, targets, device="t4")
    return dataclasses.replace(plan, graphs=tuple(map(with_backward, plan.graphs)))


def mixed_plan() -> Plan:
    """Three layers, of which the policy keeps the middle one in FP32."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(32, 64))
    return plan_for(model, torch.ones(8, 64), device="t4", policy=Policy(modules={"1": "fp32"}))


def evil_plan() -> Plan:
    """A module with a name that would be markup, and every other text of the plan like it."""
    model = nn.Sequential()
    model.add_module(EVIL, nn.Linear(4, 4))
    plan = plan_for(model, torch.ones(3, 4), device="t4")
    (graph,) = plan.graphs
    nodes = tuple(
        dataclasses.replace(node, reason=EVIL, source=EVIL, frames=(EVIL,), op=EVIL, rule=EVIL)
        for node in graph.nodes
    )
    graph = dataclasses.replace(
        with_backward(graph),
        nodes=nodes,
        ends_with=EVIL,
        before=tuple(dataclasses.replace(line, text=EVIL) for line in graph.before),
    )
    left = GraphPlan("O0", "float32", "cpu", left=EVIL)
    return dataclasses.replace(
        plan, model=EVIL, graphs=(graph, left), repairs=(EVIL,), versions={EVIL: EVIL}
    )


def long_plan() -> Plan:
    """More than 3000 operators, in the graphs of a model that breaks often."""
    plan = resnet_plan()
    return dataclasses.replace(plan, graphs=plan.graphs * 50)


def with_backward(graph: GraphPlan) -> GraphPlan:
    """One backward operator for each operator of the forward, in reverse."""
    if graph.backward:
        return graph
    nodes = [node for node in reversed(graph.nodes) if not node.is_added]
    backward = (
        BackwardNode(f"{node.name}_backward", f"{node.op}_backward", node.planned, node.name)
        for node in nodes
    )
    return dataclasses.replace(graph, backward=tuple(backward))
