"""Joint graphs for tests of widen_weight_gradients: a forward and backward, traced on the CPU; the
pass is shown CUDA fakes of their values.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from mpcompile import ir
from mpcompile.passes.joint.widen_weight_gradients import widen_weight_gradients


def on(device: str, graph: fx.Graph) -> fx.Graph:
    """The same graph with every value a fake one on `device`."""
    for node in graph.nodes:
        value = ir.tensor(node)
        if isinstance(value, FakeTensor):
            with value.fake_mode:
                node.meta["val"] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device=device
                )
    return graph


class Joint:
    """A forward and backward in one graph; `program` takes the tangents last, by that name."""

    def __init__(
        self, program: Callable[..., Any], *inputs: torch.Tensor, device: str = "cuda", **kw: Any
    ) -> None:
        kw = {"tracing_mode": "fake", **kw}
        self.gm = make_fx(program, select_decomp_table(), **kw)(*inputs)
        self.graph = on(device, self.gm.graph)
        self.graph.eliminate_dead_code()

    @property
    def text(self) -> str:
        return ir.render(self.graph).replace("prims::convert_element_type", "cast")

    @property
    def targets(self) -> list[Any]:
        return [node.target for node in self.graph.nodes]

    def run(self) -> bool:
        """Run the pass; what it says of itself and of each value must be true."""
        before, dtypes = self.text, self._dtypes()
        changed = widen_weight_gradients(self.graph)
        assert changed == (self.text != before)
        self.graph.lint()
        for node in self.graph.nodes:
            if node in dtypes and (value := node.meta["val"]).dtype != dtypes[node]:
                ir.refresh(node)
                now = node.meta["val"]
                assert (now.dtype, now.shape) == (torch.float32, value.shape)
                assert now.stride() == value.stride()
        return changed

    def _dtypes(self) -> dict[fx.Node, torch.dtype]:
        return {node: ir.dtype(node) for node in self.graph.nodes if ir.tensor(node) is not None}

    def run_twice(self) -> None:
        assert self.run()
        text = self.text
        assert not self.run()
        assert self.text == text
