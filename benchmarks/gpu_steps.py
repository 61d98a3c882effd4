"""What one training step asks of a GPU, for `gpu_traffic`; a process of its own for each GPU.

Three steps of each model in each arm, on a GPU that exists by name; the third is counted.
"""

from __future__ import annotations

import sys

if "torch" not in sys.modules:  # in a process of its own
    from benchmarks import fakecuda  # before torch
    from benchmarks.fakecuda.counting import Counter, count
    from benchmarks.fakecuda.device import let_fakes_be_masters

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cuda_parts.inductor import Sheet
from benchmarks.harness.ways import Way, trainer_for
from benchmarks.models import (
    GPT2,
    BERTEncoder,
    Discriminator,
    Generator,
    Recommender,
    Sample,
    ViT,
    pixels,
    resnet50,
    tokens,
)  # fmt: skip

# Seconds from one kernel of a CUDA graph to the next, however short; the host takes longer.
FLOOR = 2e-6
_CAST = {"convert_element_type.default", "permute.default", "reshape.default",
         "constant_pad_nd.default"}  # fmt: skip


STEPS = 3  # the second is as all others; that one is compiled for
SETTLED = "grad_scaler"  # the default searches in the first step, then they are as with this


FP32 = Way("compile FP32", compiled=True, fused=True)
AUTOCAST = Way("compile + autocast + GradScaler", torch.float16, compiled=True, fused=True)


def _ours(level: str, what: str = "", **options: Any) -> Way:
    """`what` beside the level; an `MPOptimizer` is around AdamW where that says so."""
    return Way(f"mpcompile {level}{what}", torch.float16, level, fused=True,
               generated="MPOptimizer" in what, options={"loss_scale": SETTLED, **options}
               )  # fmt: skip


OURS = (
    *(_ours(level, what) for level in ("O1", "O2") for what in ("", ", MPOptimizer")),
    _ours("O2", ", MPOptimizer, recompute", recompute=True),
)
ARMS = (FP32, AUTOCAST, *OURS)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        build: makes the model, or the generator and the discriminator; of this many layers.
        layers: how many the model has, where it is counted at fewer of them (see `whole`).
        batch: examples, by GPU.
        sample: of one batch size.
    """

    name: str
    build: Callable[..., nn.Module | tuple[nn.Module, nn.Module]]
    batch: dict[str, int]
    sample: Callable[[int], Sample]
    layers: int | None = None


# What a layer adds depends on whether its number is even: which of the sums along the residual
# stream the partitioner computes again goes in turns of two.
COUNTED = (2, 4)
CHECKED = 6


def _gan(**sizes: int) -> tuple[nn.Module, nn.Module]:
    return Generator(**sizes), Discriminator(**sizes)


CASES = (
    Case("GPT-2 124M, T1024", GPT2, {"h100": 16, "t4": 2},
         lambda batch: tokens(batch, 1024, 50257, 50257), layers=12),
    Case("BERT-large, T512", BERTEncoder, {"h100": 32, "t4": 4},
         lambda batch: tokens(batch, 512, 30522, 2), layers=24),
    Case("ViT-B/16", ViT, {"h100": 128, "t4": 16}, pixels),
    Case("ResNet-50", resnet50, {"h100": 256, "t4": 32}, pixels),
    Case("DLRM", functools.partial(Recommender, rows=1000), {"h100": 16384, "t4": 16384},
         lambda batch: Sample((batch, 13), (batch,), 2)),
    Case("DCGAN", _gan, {"h100": 128, "t4": 128}, lambda batch: pixels(batch, 64)),
)  # fmt: skip

# For a smoke test.
TINY = (
    Case("GPT-2, tiny", functools.partial(GPT2, vocab=61, context=16, width=64, heads=2,
         layers=2),
         {"h100": 2, "t4": 2}, lambda batch: tokens(batch, 16, 61, 61)),
    Case("DCGAN, tiny", functools.partial(_gan, width=8), {"h100": 2, "t4": 2},
         lambda batch: pixels(batch, 64)),
)  # fmt: skip
TINY_ARMS = (AUTOCAST, OURS[3])


# -- one step -------------------------------------------------------------------------------------


class Training:
    """A compiled model, or two, with what trains them.

    Attributes:
        stepped: which of the kernels counted, by number, an optimizer or the scaler asked for.
    """

    def __init__(self, models: Sequence[nn.Module], arm: Way, counter: Counter) -> None:
        self.counter = counter
        self.trainer = trainer_for(arm, "inductor", torch.device("cuda"))
        self.models = [self.trainer.compiled(model) for model in models]
        adam = functools.partial(torch.optim.AdamW, lr=1e-4)
        self.optimizers = [self.trainer.optimizer(adam, [*m.parameters()]) for m in self.models]
        self.stepped: set[int] = set()

    def step(self, batch: Sequence[Tensor]) -> None:
        self.stepped.clear()
        if len(self.models) == 2:
            self._adversarial(batch[0])
        else:
            self.trainer.backward(self._forward(0, *batch))
            self._update(0)
        with self._stepping():
            self.trainer.done()

    def _adversarial(self, images: Tensor) -> None:
        """The step of PyTorch's DCGAN tutorial."""
        real, fake = torch.ones(len(images)), torch.zeros(len(images))
        made = self._forward(0, torch.randn(len(images), 100, 1, 1))
        self.trainer.backward(self._judge(images, real))
        self.trainer.backward(self._judge(made.detach(), fake))
        self._update(1)
        self.trainer.backward(self._judge(made, real))
        self._update(0)

    def _judge(self, images: Tensor, wanted: Tensor) -> Tensor:
        logits = self._forward(1, images)
        return F.binary_cross_entropy_with_logits(logits.float(), wanted)

    def _forward(self, which: int, *inputs: Tensor) -> Tensor:
        with self.trainer.forward():
            result: Tensor = self.models[which](*inputs)
        return result

    def _update(self, which: int) -> None:
        with self._stepping():
            self.trainer.step(self.optimizers[which])

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        before = len(self.counter.done)
        yield
        self.stepped |= set(range(before, len(self.counter.done)))


Counts = dict[str, dict[str, float]]  # of a part of the step: quantity -> how much


def counted(
    case: Case, arm: Way, device: fakecuda.FakeGPU, counter: Counter, name: str, **sizes: int
) -> Counts:
    """What one step of a model of these sizes asks for."""
    torch._dynamo.reset()
    with device, torch.device("cuda"):
        built = case.build(**sizes)
        models = built if isinstance(built, tuple) else (built,)
        training = Training(models, arm, counter)
        sample = case.sample(case.batch[name])
        for _ in range(STEPS):
            device.reads.clear()
            with counter.watch() as done:
                training.step(sample.empty(torch.device("cuda")))
    step = [launch for i, launch in enumerate(done) if i in training.stepped]
    rest = [launch for i, launch in enumerate(done) if i not in training.stepped]
    found = {"forward and backward": rest, "optimizer": step}
    return {
        **{part: totals(launches, device.gpu) for part, launches in found.items()},
        "host": {"syncs": len(device.reads)},
    }


def whole(case: Case, arm: Way, device: fakecuda.FakeGPU, counter: Counter, name: str) -> Counts:
    """The same for a model of all its layers: of many alike, from what two smaller models ask for.

    How far a third is from what these two say is told for one arm.
    """
    if case.layers is None:
        return counted(case, arm, device, counter, name)
    few, more = (counted(case, arm, device, counter, name, layers=n) for n in COUNTED)
    found = _extrapolated(few, more, case.layers)
    if arm is AUTOCAST:
        checked = counted(case, arm, device, counter, name, layers=CHECKED)
        found["layers"] = {"apart": _apart(checked, _extrapolated(few, more, CHECKED))}
    return found


def _extrapolated(few: Counts, more: Counts, layers: int) -> Counts:
    """For an even number of layers, from the counts at `COUNTED` layers."""
    first, second = COUNTED
    times = (layers - first) // (second - first)
    return {
        part: {key: value + (more[part][key] - value) * times for key, value in few[part].items()}
        for part in few
    }


def _apart(found: Counts, wanted: Counts) -> float:
    """By how much two counts of forward and backward differ, the most of all quantities."""
    part = "forward and backward"
    return max(
        abs(value - wanted[part][key]) / max(value, 1e-9) for key, value in found[part].items()
    )


# -- what kernels cost ----------------------------------------------------------------------------


def totals(launches: Sequence[fakecuda.Launch], gpu: Sheet) -> dict[str, float]:
    """Kernels, bytes, FLOPs by dtype, and seconds at the ceilings, in three ways."""
    found = {"seconds": 0.0, "seconds with the floor": 0.0, "seconds with TF32": 0.0}
    for kind in ("generated", "product", "library"):
        of_kind = [launch for launch in launches if launch.kind == kind]
        found[f"{kind} kernels"] = len(of_kind)
        found[f"{kind} bytes"] = sum(launch.bytes for launch in of_kind)
    casts = [launch for launch in launches if _casts_only(launch)]
    found["cast kernels"], found["cast bytes"] = len(casts), sum(c.bytes for c in casts)
    found["short kernels"] = sum(seconds(c, gpu, tf32=True) < FLOOR for c in launches)
    for launch in launches:
        plain = seconds(launch, gpu, tf32=False)
        found["seconds"] += plain
        found["seconds with the floor"] += max(plain, FLOOR)
        found["seconds with TF32"] += seconds(launch, gpu, tf32=True)
    for dtype in (torch.float16, torch.float32):
        flops = sum(launch.flops for launch in launches if launch.dtype is dtype)
        found[f"{dtype} FLOPs"] = flops
    return found


def _casts_only(launch: fakecuda.Launch) -> bool:
    return launch.name in ("aten._to_copy.default",) or (
        launch.kind == "generated" and set(launch.name.split(", ")) <= _CAST
    )


def seconds(launch: fakecuda.Launch, gpu: Sheet, *, tf32: bool) -> float:
    """The longer of moving its bytes and doing its FLOPs, at the data sheet's rates.

    TF32 runs at half the rate of FP16 where it exists (data sheets of A100 and H100). torch allows
    it in convolutions from the start, in matrix products only if told to.
    """
    if launch.dtype is torch.float16:
        rate = gpu.low
    elif gpu.capability >= (8, 0) and (tf32 or "convolution" in launch.name):
        rate = gpu.low / 2
    else:
        rate = gpu.fp32
    return max(launch.bytes / gpu.bandwidth, launch.flops / rate)


def count_all(name: str, quick: bool) -> dict[str, dict[str, Counts]]:
    """Model -> arm -> what a step asks of the GPU of this name, of `mpcompile.devices.gpus`."""
    warnings.filterwarnings("ignore")  # torch's advice to users of TF32, and on fakes
    device = fakecuda.become(name)
    counter = count(device)
    let_fakes_be_masters()
    cases, arms = (TINY, TINY_ARMS) if quick else (CASES, ARMS)
    return {
        case.name: {arm.name: whole(case, arm, device, counter, name) for arm in arms}
        for case in cases
    }
