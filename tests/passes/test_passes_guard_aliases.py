"""guard_aliases: results that share memory are cast for the caller where the memory is made."""

from typing import Any

import torch
import torch.nn.functional as F
from compare import fallback_reason, leaf
from expecttest import assert_expected_inline
from graphs import Stage
from torch import Tensor

from mpcompile import Policy, pipeline
from mpcompile.passes.graph.guard_aliases import guard_aliases


def whole_and_view(x: Tensor, w: Tensor) -> Any:
    h = F.linear(x, w)
    return h, h.view(-1)


def parts(x: Tensor, w: Tensor) -> Any:
    return F.linear(x, w).transpose(0, 1).chunk(2, 0)


def test_applies() -> None:
    stage = Stage(guard_aliases, whole_and_view, leaf(8, 16), leaf(16, 16))
    stage.run_twice()
    assert_expected_inline(
        stage.marks,
        """\
linear: LOW [table]
view: FULL [alias]
""",
    )


def test_up_to_what_makes_the_memory() -> None:
    stage = Stage(guard_aliases, parts, leaf(8, 16), leaf(16, 16))
    stage.run_twice()
    assert_expected_inline(
        stage.marks,
        """\
linear: LOW [table]
transpose: FULL [alias]
chunk: FULL [alias]
getitem: FULL [alias]
getitem_1: FULL [alias]
""",
    )


def test_one_result_alone() -> None:
    def alone(x: Tensor, w: Tensor) -> Any:
        h = F.linear(x, w).view(-1)
        return h, h, x.sum()

    stage = Stage(guard_aliases, alone, leaf(8, 16), leaf(16, 16))
    before = stage.marks
    stage.run()
    assert stage.marks == before


def test_a_view_that_is_tracked_though_made_under_no_grad() -> None:
    def program(x: Tensor, w: Tensor) -> Any:
        h = F.linear(x, w)
        with torch.no_grad():
            return h.view(-1), h.relu()

    stage = Stage(guard_aliases, program, leaf(8, 16), leaf(16, 16))
    stage.run_twice()
    assert_expected_inline(
        stage.marks,
        """\
linear: LOW [table]
_set_grad_enabled: KEEP [captured]
view: FULL [alias]
relu: FOLLOW [table]
_set_grad_enabled_1: KEEP [captured]
""",
    )


def test_the_users_word_is_not_overruled() -> None:
    policy = Policy(nodes={"view": "low"})
    stage = Stage(guard_aliases, whole_and_view, leaf(8, 16), leaf(16, 16), policy=policy)
    before = stage.marks
    stage.run()
    assert stage.marks == before


def test_without_it_the_specification_refuses_the_graph(monkeypatch: Any) -> None:
    def nothing(gm: torch.fx.GraphModule, config: Any) -> bool:
        return False

    passes = tuple(nothing if p is guard_aliases else p for p in pipeline.PASSES)
    monkeypatch.setattr(pipeline, "PASSES", passes)
    for scale in ("dynamic", "none"):
        torch._dynamo.reset()
        reason = fallback_reason(whole_and_view, leaf(8, 16), leaf(16, 16), loss_scale=scale)
        assert "no longer lies in the memory of" in reason
