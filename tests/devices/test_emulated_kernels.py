"""On a GPU that is emulated: Inductor's kernels in Triton's interpreter, against torch on the host;
and what the host asks of it in one step.

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


def compiled(function: Callable[..., Any], *given: torch.Tensor) -> tuple[Any, list[str]]:
    """The result on the device, and the kernels that were run for it."""
    from benchmarks.emucuda.device import this_gpu

    launched = this_gpu().launched
    launched.clear()
    return torch.compile(function)(*(x.to(CUDA) for x in given)), list(launched)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": torch.nn.functional.gelu,
    "softmax": lambda x: torch.softmax(x, -1),
    "variance": lambda x: x.var(0),
    "cumsum": lambda x: x.cumsum(-1),
    "argmax": lambda x: x.argmax(-1),
    "functions": lambda x: torch.expm1(x).atan() + torch.log1p(x.abs()) ** 1.5 + x.erf().sinh(),
    "transposed": lambda x: (x.t() + 1).contiguous() * 2,
    "a row less": lambda x: x[1:] - x[:-1],
    "integers": lambda x: (x * 8).to(torch.int32) // 3 % 5,
    "where": lambda x: torch.where(x > 0.5, x, x.neg()).clamp(-1, 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_generated_kernel_against_the_host(name: str, dtype: torch.dtype) -> None:
    """Of sizes that no block divides; in FP64 on the host. A running sum of 131 is off by as many
    roundings of values up to some 30.
    """
    x = torch.randn(37, 131).to(dtype)
    found, launched = compiled(FUNCTIONS[name], x)
    wanted = FUNCTIONS[name](x.double())
    assert launched, "nothing was generated"
    if not wanted.is_floating_point():
        assert torch.equal(found.cpu(), wanted)
        return
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    most = 131 * 30 * torch.finfo(torch.float32).eps if name == "cumsum" else 8 * eps
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=8 * eps, atol=most)


def test_bf16_is_rounded_to_nearest_even() -> None:
    """1 + 2^-8 lies between two values of BF16, and so does 1 + 3 * 2^-8; the even ones win."""
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20])
    found, _ = compiled(lambda x: x.to(torch.bfloat16), x)
    assert found.tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7]


def test_a_sum_is_as_exact_as_a_tree() -> None:
    """2^24 and ones: added one after the other in FP32, each one is lost."""
    x = torch.ones(1, 4096)
    x[0, 0] = 2.0**24
    found, launched = compiled(lambda x: x.sum(-1), x)
    assert launched
    assert found.item() == 2.0**24 + 4096  # 4095, to the nearest FP32


def test_a_kernel_reads_nothing_but_its_arguments() -> None:
    """Index 100 of 100. Inductor's own check of indices is off: it would come first."""
    x, indices = torch.arange(100.0), torch.tensor([3, 99, 100])
    with torch._inductor.config.patch(assert_indirect_indexing=False):
        found, _ = compiled(lambda x, i: x[i], x, indices[:2])
        assert found.tolist() == [3.0, 99.0]
        with pytest.raises(RuntimeError, match=r"illegal memory access.*load in .*, 1 of 3"):
            compiled(lambda x, i: x[i], x, indices)


def test_what_a_kernel_leaves_out_is_nan() -> None:
    """Fresh memory reaches a result where nobody has written to it."""
    found, _ = compiled(lambda x: torch.empty_like(x).add(x), torch.ones(5))
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
