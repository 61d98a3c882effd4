"""The GPU that is emulated, operator by operator: values, memory, waits, copies that come late.

Each GPU is a process of its own (`tests/support/emulated_eager.py`).
"""

from typing import Any

import pytest
from emulated import needs_a_compiler, told_by

pytestmark = [
    pytest.mark.slow("GPUs that are emulated, each in a process of its own"),
    needs_a_compiler("2.13"),
]

FP16, FP32 = 2.0**-11, 2.0**-24
"""The largest relative error of one rounding."""


def told(part: str, gpu: str = "h100") -> Any:
    return told_by("emulated_eager.py", gpu)[part]


@pytest.mark.parametrize("gpu", ["h100", "t4"])
def test_it_is_the_gpu_of_the_data_sheet(gpu: str) -> None:
    for fact in ("name", "capability"):
        found, wanted = told(fact, gpu)
        assert found == wanted


# -- memory ----------------------------------------------------------------------------------------


def test_fresh_memory_is_nan_in_every_dtype() -> None:
    assert all(told("fresh_memory"))


def test_an_address_is_used_again_once_it_is_free() -> None:
    assert told("addresses") == {"again": True, "apart": True}


def test_memory_is_counted_in_blocks_of_512_bytes() -> None:
    """100 floats are one block, 1000 are eight."""
    assert told("memory") == [512, 512 + 8 * 512, 0]


def test_tensors_share_memory_as_elsewhere() -> None:
    x = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    wanted = {"view": x, "out": x + x, "set": [x[2:4], x[4:6]], "device": "cuda:0"}
    assert told("shared_memory") == wanted


def test_a_checkpoint_comes_back_to_the_device() -> None:
    assert told("saved") == ["cuda:0", "[0.0, 1.0, 2.0]"]


# -- values ----------------------------------------------------------------------------------------


def test_low_products_are_summed_in_fp32_and_rounded_once() -> None:
    assert all(told("products"))


def test_operands_of_two_dtypes_are_refused() -> None:
    """In FP32, in which they are computed, they would be of one."""
    for message in told("refused"):
        assert "one dtype" in message


def test_random_numbers_follow_the_seed_and_the_state() -> None:
    assert told("random_numbers") == {"seeded": True, "state": True}


@pytest.mark.parametrize(
    ("gpu", "case", "kernel"),
    [
        ("h100", "torch.float16 is_causal", "Flash"),
        ("h100", "torch.float16 attn_mask", "Efficient"),
        ("h100", "torch.float32 is_causal", "Efficient"),
        ("t4", "torch.float16 is_causal", "Efficient"),  # FlashAttention wants Ampere
    ],
)
def test_attention_takes_the_kernel_of_its_gpu(gpu: str, case: str, kernel: str) -> None:
    name, result, gradient = told("attention", gpu)[case]
    assert name == f"ScaledDotProduct{kernel}AttentionBackward0"
    # Gradients of queries, keys and values, which are one tensor here: each is rounded, and summed.
    rounding = FP16 if "float16" in case else FP32
    assert result < 8 * rounding
    assert gradient < 32 * rounding


def test_attention_with_dropout_is_written_out() -> None:
    for case in ("torch.float16 dropout_p", "torch.float32 dropout_p"):
        assert "ScaledDotProduct" not in told("attention")[case][0]


@pytest.mark.parametrize("layer", ["lstm", "gru", "conv", "batch norm"])
def test_layers_of_cudnn_against_fp64(layer: str) -> None:
    assert all(error < 64 * FP32 for error in told("layers")[layer])


# -- waits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["item", "if", "nonzero", "mask", "cpu", "to the device"])
def test_what_waits_for_the_device_raises(call: str) -> None:
    assert "synchronizing CUDA operation" in told("waits")[call]


@pytest.mark.parametrize("call", ["in time", "pinned to the device", "add", "product", "optimizer"])
def test_what_does_not_wait_goes_on(call: str) -> None:
    assert told("waits")[call] == ""


def test_a_copy_to_pinned_memory_arrives_with_its_event() -> None:
    """Not before, and with the values of the time when it was asked for."""
    found = told("late_copies")
    assert found["early"]
    assert not found["asked"]
    assert found["happened"]
    assert found["arrived"] == [5.0, 5.0, 5.0]
    assert found["early again"]
    assert found["waited for"] == [float(found["kernels"])] * 3
