"""Graphs for tests of passes: capture a program, run the passes before one, then that one."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch import fx

from mpcompile import ir
from mpcompile.capture import pipeline
from mpcompile.capture.capture import capture
from mpcompile.capture.surroundings import around_now
from mpcompile.rules.policy import Config, Level, Policy, TensorCores


def captured(program: Any, *inputs: Any, **options: Any) -> fx.GraphModule:
    """The graph that capture makes of a program; `options` go to torch.compile."""
    graphs = []

    def backend(gm: fx.GraphModule, examples: Sequence[Any]) -> Any:
        graphs.append(capture(gm, examples, around_now(gm, examples)))
        return gm.forward

    torch.compile(program, backend=backend, fullgraph=True, **options)(*inputs)
    (graph,) = graphs
    return graph


class Stage:
    """A graph in front of one pass.

    `run()` runs the pass; `text` is the graph as it stands, `marks` its decisions.
    """

    def __init__(self, pass_: pipeline.Pass, program: Any, *inputs: Any, **options: Any) -> None:
        wanted: dict[str, Any] = {"level": "O1", "low": torch.float16, "policy": Policy()}
        wanted.update(fuse_head=False, scaled=False, has_kernel=lambda node: True)
        wanted.update(pad="never", cores=TensorCores(), copied={})
        wanted.update((k, options.pop(k)) for k in list(options) if k in wanted)
        wanted["level"] = Level(wanted["level"])
        self.config = Config(device=torch.device("cpu"), **wanted)
        self.gm = captured(program, *inputs, **options)
        self.pass_ = pass_
        for earlier in pipeline.PASSES[: pipeline.PASSES.index(pass_)]:
            earlier(self.gm, self.config)

    def run(self) -> bool:
        """Run the pass once, verify the graph; what it says of itself must be true."""
        before = self.text
        changed = self.pass_(self.gm, self.config)
        pipeline.verify(self.gm, self.pass_.__name__)
        assert changed == (self.text != before)
        return changed

    def run_twice(self) -> None:
        """Run the pass; a second run must change nothing and decide nothing again."""
        self.run()
        text, marks = self.text, self.marks
        assert not self.run()
        assert (self.text, self.marks) == (text, marks)

    @property
    def text(self) -> str:
        """The graph, bodies of activation checkpoints included; their operator by a short name."""
        bodies = [
            f"\n{name}:\n{ir.render(body.graph)}"
            for name, body in self.gm.named_children()
            if isinstance(body, fx.GraphModule)
        ]
        text = _renumbered(ir.render(self.gm.graph) + "".join(bodies))
        return re.sub(r"(higher_order::)?tag_activation_checkpoint", "checkpoint", text)

    @property
    def marks(self) -> str:
        """`linear: LOW [table]`, a line for each decided node."""
        return "".join(
            f"{node.name}: {ir.mark(node).precision.value} [{ir.mark(node).rule}]\n"
            for node in self.gm.graph.nodes
            if ir.is_marked(node)
        )

    def expect_text(self, expected: str) -> None:
        assert_expected_inline(self.text, expected, skip=1)

    def expect_marks(self, expected: str) -> None:
        assert_expected_inline(self.marks, expected, skip=1)

    def mark(self, name: str) -> ir.Mark:
        return ir.mark(self.node(name))

    def node(self, name: str) -> fx.Node:
        return next(n for n in self.gm.graph.nodes if n.name == name)


def ran(pass_: pipeline.Pass, program: Any, *inputs: Any, **options: Any) -> Stage:
    """A stage whose pass has run."""
    stage = Stage(pass_, program, *inputs, **options)
    stage.run()
    return stage


def ran_twice(pass_: pipeline.Pass, program: Any, *inputs: Any, **options: Any) -> Stage:
    """A stage whose pass has run twice."""
    stage = Stage(pass_, program, *inputs, **options)
    stage.run_twice()
    return stage


def _renumbered(text: str) -> str:
    """Symbols as s0, s1, ... in order of appearance: torch numbers them as it likes."""
    names: dict[str, str] = {}
    return re.sub(r"\bs\d+\b", lambda m: names.setdefault(m[0], f"s{len(names)}"), text)
