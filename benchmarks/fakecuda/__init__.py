"""A CUDA device that exists by name only, for tests and figures on machines without a GPU.

    from benchmarks import fakecuda                      # before torch: loads a small C++ library
    device = fakecuda.become("h100")     # torch.cuda now tells of an H100

    with device:                         # tensors are fakes: a shape, a dtype, a device, no memory
        with torch.device("cuda"):
            model, x = Net(), torch.randn(64, 512)
        model = mpcompile(model)
        ...                              # forward, backward, optimizer
    device.reads                         # where the host read a value: each would wait for the GPU

Dynamo, autograd, AOTAutograd, the compiler's passes and the generated step run as they do on a GPU.
For `emit="inductor"` there are two lanes: `fakecuda.counting` counts the kernels that Inductor
plans; `fakecuda.kernels` lets it generate them, and Triton compiles them for the GPU.

It cannot show: FP16 numerics on Tensor Cores, what cuBLAS and cuDNN refuse, whether a kernel
exists, CUDA graphs, streams, races, times, autotuning.

A process that has become a GPU stays one: use one for each.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.cuda_parts.build import CannotBuild, load

LIBRARY = load(Path(__file__).with_name("guard.cpp"))  # before torch, which the next line imports

from benchmarks.fakecuda.device import FakeGPU, become  # noqa: E402

__all__ = ["LIBRARY", "CannotBuild", "FakeGPU", "become"]
