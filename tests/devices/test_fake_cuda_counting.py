"""What is counted on a GPU that exists by name, against arithmetic by hand; and of a whole step its
kernels, host reads, and what would be recorded.
"""

from typing import Any

import pytest
from gpus_by_name import needs_a_cpu_build, told

pytestmark = [
    pytest.mark.slow("counts kernels of a GPU by name, in a process of its own"),
    needs_a_cpu_build,
]


def counted(gpu: str) -> dict[str, Any]:
    return told("fake_cuda_counting.py", gpu)


def test_a_product_and_a_generated_kernel() -> None:
    m, k, n = 64, 512, 256
    assert counted("h100")["graph"] == [
        ["aten.mm.default", "product", 4 * (m * k + k * n + m * n), 2 * m * k * n, "torch.float32"],
        ["relu.default", "generated", 4 * 2 * m * n, 0, "None"],  # in place
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("gpu", "kernel"), [("h100", "flash_attention"), ("t4", "efficient_attention")]
)
def test_attention_takes_the_kernel_of_its_gpu(gpu: str, kernel: str) -> None:
    """FlashAttention wants 16 bits and Ampere. Queries, keys and values are one tensor here."""
    batch, heads, length, head = 2, 4, 128, 64
    values = batch * heads * length * head
    flops = 2 * 2 * values * length
    name = f"aten._scaled_dot_product_{kernel}.default"
    assert counted(gpu)["FP16 attention"] == [
        [name, "product", 2 * 2 * values, flops, "torch.float16"]
    ]
    name = "aten._scaled_dot_product_efficient_attention.default"
    assert counted(gpu)["FP32 attention"] == [
        [name, "product", 4 * 2 * values, flops, "torch.float32"]
    ]


def test_bytes_of_torchs_fused_step() -> None:
    """p, g, m, v read and p, m, v written; under a scaler g is written twice and read once more."""
    parameters = 1000 * 1000
    for step, each in (("fused step", 28), ("fused step, scaled", 40)):
        moved = sum(size for _, _, size, _, _ in counted("h100")[step])
        assert 0 <= moved - each * parameters < 200


def test_bytes_of_a_generated_step() -> None:
    """p, m, v read and written, a FP32 gradient read twice, the FP16 copy written: 34."""
    parameters = 1024 * 1024
    launches = counted("h100")["generated step"]
    assert 0 <= sum(size for _, _, size, _, _ in launches) - 34 * parameters < 400
    assert sum(size > parameters for _, _, size, _, _ in launches) == 2


def test_a_generated_step_of_many_parameters_is_few_kernels() -> None:
    """No kernel for each of them: a launch costs more than so small an update."""
    assert len(counted("h100")["step of many"]) <= 12


def test_how_many_kernels_a_list_of_tensors_takes() -> None:
    """252 tensors or 2240 blocks of 65536 elements in each: none, 252, 253, full, one element more,
    and one of no elements beside one of one.
    """
    assert counted("h100")["launches"] == [0, 1, 2, 1, 2, 1]


@pytest.mark.parametrize("gpu", ["h100", "t4"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_are_unscaled_and_looked_at_in_few_kernels(gpu: str, level: str) -> None:
    """24 gradients: no kernel is there for one alone, and autocast takes no fewer."""
    autocast, ours = (counted(gpu)["trained"][how] for how in ("", level))
    (together,) = (k for k in ours if k[0] == "mpcompile.unscale_all.default")
    # Read and written: at O1 what products and sums leave in FP32, at O2 sums of the norms alone.
    elements = {"O1": 6 * 512 * (512 + 3), "O2": 6 * 512 * 2}[level]
    assert 0 <= together[2] - 8 * elements <= 16
    made = [name for name, kind, *_ in ours if kind == "generated"]
    looks = [name for name in made if "any.d" in name and "mul.Tensor" not in name]
    assert len(looks) == {"O1": 0, "O2": 1}[level]  # at the rows of all others
    assert len(ours) <= len(autocast)


# -- a whole step ----------------------------------------------------------------------------------

each_level = pytest.mark.parametrize("level", ["O1", "O2"])


def both(level: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is told of the step in pieces, and of the whole one."""
    found = [run for run in counted("h100")["steps"] if run["level"] == level]
    pieces, whole = sorted(found, key=lambda run: bool(run["whole"]))
    return pieces, whole


@each_level
def test_it_is_no_more_kernels_than_the_pieces_and_moves_no_more(level: str) -> None:
    """In pieces, a kernel looks at many gradients (`passes/joint/together.py`). Here the
    step reads them anyway: each is looked at by what updates its parameter.
    """
    pieces, whole = both(level)
    assert whole["left"] is None
    assert whole["kernels"] <= pieces["kernels"]
    assert whole["bytes"] < 1.001 * pieces["bytes"]


@each_level
def test_nobody_waits_for_the_device(level: str) -> None:
    for run in both(level):
        assert run["reads"] == 0


@each_level
def test_it_is_recorded_as_one_cuda_graph_whose_state_stays(level: str) -> None:
    """Parameters, two moments and a counter each, copies at O2 and the scale are written to."""
    pieces, whole = both(level)
    assert whole["not recorded"] == 0
    assert len(pieces["recorded"]) == 2  # forward and backward
    (graph,) = whole["recorded"]
    assert set(graph["written"]) <= set(graph["stay"])
    assert len(graph["written"]) >= (5 if level == "O2" else 4) * whole["parameters"]
