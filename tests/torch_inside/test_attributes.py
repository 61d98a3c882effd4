"""What is read inside torch is as it was, where no test of what it is read for says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpcompile.torch_inside.graphs import overload_name, packet_name
from mpcompile.torch_inside.inductor import PRE_FUSION, has_setting
from mpcompile.torch_inside.modules import (
    COMPILED_CALL,
    compiled_call,
    plain_call,
    set_compiled_call,
)
from mpcompile.torch_inside.names import builder, dynamo_config, meta_utils
from mpcompile.torch_inside.optimizers import init_group
from mpcompile.torch_inside.tensors import base_of

pytestmark = pytest.mark.inside

X = torch.zeros(2)
ADD = torch.ops.aten.add
INDUCTORS = ("joint_custom_post_pass", "post_grad_custom_post_pass", "custom_partitioner_fn",
             "max_autotune_gemm_backends", "cpp_wrapper", PRE_FUSION)  # fmt: skip

READ: dict[str, tuple[Callable[[], Any], Any]] = {
    "views": (lambda: [base_of(X[:1]) is X, base_of(X)], [True, None]),
    # Dynamo
    "guards may be skipped": (
        lambda: bool(dynamo_config.skip_tensor_guards_with_matching_dict_tags), True,
    ),
    "gradients are read": (
        lambda: [bool(module.safe_grad) for module in (builder, meta_utils)], [True, True],
    ),
    # Inductor
    "settings": (lambda: [name for name in INDUCTORS if not has_setting(name)], []),
    # operators
    "overloads": (
        lambda: [overload_name(op) for op in (ADD.Tensor, ADD.out, torch.ops.aten.relu.default)],
        ["Tensor", "out", "default"],
    ),
    "packets": (lambda: packet_name(ADD), "aten::add"),
    # optimizers
    "state": (
        lambda: init_group(torch.optim.SGD([X])).__module__.partition(".optim.")[0], "torch",  # type: ignore[union-attr]
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", READ)
def test_it_is_read(what: str) -> None:
    read, wanted = READ[what]
    assert read() == wanted


def test_runs() -> None:
    module = nn.Identity()
    before = compiled_call(module)
    set_compiled_call(module, lambda x: x + 1)
    assert (before, module(1), plain_call(module)(1)) == (None, 2, 1)
    assert plain_call(nn.Identity)(module, 3) == 3
    assert COMPILED_CALL in vars(module)
    assert COMPILED_CALL not in module.__getstate__()
