"""On a GPU that is emulated: where Inductor's kernels, in Triton's interpreter, must not be kinder
than a GPU; and what the host asks of it in one step.

make emulated
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulated import EMULATED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not EMULATED, reason="about the emulated GPU: make emulated"),
]

CUDA = torch.device("cuda")


def compiled(function: Callable[..., Any], *given: torch.Tensor) -> Any:
    """The result on the device."""
    return torch.compile(function)(*(x.to(CUDA) for x in given))


def test_bf16_is_rounded_to_nearest_even() -> None:
    """1 + 2^-8 lies between two values of BF16, and so does 1 + 3 * 2^-8; the even ones win."""
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20])
    found = compiled(lambda x: x.to(torch.bfloat16), x)
    assert found.tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]


def test_a_kernel_reads_nothing_but_its_arguments() -> None:
    """Index 100 of 100. Inductor's own check of indices is off: it would come first."""
    x, indices = torch.arange(100.0), torch.tensor([3, 99, 100])
    with torch._inductor.config.patch(assert_indirect_indexing=False):
        found = compiled(lambda x, i: x[i], x, indices[:2])
        assert found.tolist() == [3.0, 99.0]
        with pytest.raises(RuntimeError, match=r"illegal memory access.*load in .*, 1 of 3"):
            compiled(lambda x, i: x[i], x, indices)


def test_what_a_kernel_leaves_out_is_nan() -> None:
    """Fresh memory reaches a result where nobody has written to it."""
    found = compiled(lambda x: torch.empty_like(x).add(x), torch.ones(5))
    assert found.isnan().all()


def test_fewer_launches_than_the_peer_and_no_wait() -> None:
    from benchmarks.emucuda.host_calls import ARMS, counted, launches

    arms = {arm.name: arm for arm in ARMS}
    peer = counted(arms["compile + autocast + GradScaler"], 4)
    ours = counted(arms["mpcompile O2, MPOptimizer"], 4)
    plain = counted(arms["mpcompile O2"], 4)
    assert launches(ours) < launches(peer)
    assert ours["waits"] == 0
    # Without an MPOptimizer the host asks, once, whether the step is to be skipped.
    assert plain["waits"] == 1
