"""One training step on a GPU by arithmetic: kernels, bytes, products, waits, time at the ceilings.

No GPU is needed, and none is asked. `fakecuda` stands in for one: Dynamo, AOTAutograd, the passes
and Inductor's scheduler run as they do there, and the kernels that they plan are counted instead of
generated. What runs outside of compiled graphs is counted operator by operator. Each GPU is a
process of its own (`benchmarks/gpu_steps.py`). Needs a CPU build of torch and a C++ compiler, but
no Triton.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.cuda_parts.inductor import sheet
from benchmarks.gpu_steps import ARMS, AUTOCAST, CASES, CHECKED, COUNTED, FLOOR, FP32, OURS
from benchmarks.harness.processes import call_elsewhere
from benchmarks.harness.report import Claims, Report, Settings, Table

DEVICES = ("cpu",)  # a GPU that is there is none that exists by name only
REPORT = "gpu_traffic"  # the same on every machine
GPUS = ("h100", "t4")
KINDS = ("generated", "product", "library")
PARTS = ("forward and backward", "optimizer")

Counts = dict[str, dict[str, float]]  # of one arm
Counted = dict[str, dict[str, dict[str, Counts]]]  # GPU -> model -> arm


def run(settings: Settings) -> Report:
    """Count, the GPUs side by side: some 25 minutes on two cores."""
    names = GPUS[-1:] if settings.quick else GPUS
    with ThreadPoolExecutor() as pool:
        found = pool.map(
            lambda name: call_elsewhere(
                "benchmarks.gpu_steps:count_all", name, settings.quick,
                environment={"MPCOMPILE_PROFILE": ""},
            ),
            names,
        )  # fmt: skip
        counted = dict(zip(names, found, strict=True))
    return make_report(counted)


def make_report(counted: Counted) -> Report:
    return Report(
        title="A training step on a GPU, by arithmetic",
        notes=_notes(),
        tables=[
            _losses(counted),
            *_ratios(counted),
            *(_table(*found) for found in _models(counted)),
        ],
        verdicts=dict(_verdicts(counted)),
        data={"ceilings": {name: _ceilings(name) for name in counted}, "counted": counted},
    )


def _ceilings(name: str) -> dict[str, Any]:
    known = sheet(name)
    return {"bytes/s": known.bandwidth, "FP32 FLOP/s": known.fp32, "FP16 FLOP/s": known.low}


def _models(counted: Counted) -> Iterator[tuple[str, str, dict[str, Counts]]]:
    for name, models in counted.items():
        for model, arms in models.items():
            yield name, model, arms


# -- sums -----------------------------------------------------------------------------------------


def _both(counts: Counts, key: str) -> float:
    return sum(counts[part][key] for part in PARTS)


def _kernels(counts: Counts, *parts: str) -> float:
    return sum(counts[part][f"{kind} kernels"] for part in parts or PARTS for kind in KINDS)


def _bytes(counts: Counts, *parts: str) -> float:
    return sum(counts[part][f"{kind} bytes"] for part in parts or PARTS for kind in KINDS)


def _faster(arms: dict[str, Counts], arm: str, times: str = "seconds") -> float:
    """How many times faster than autocast, at the ceilings."""
    return _both(arms[AUTOCAST.name], times) / _both(arms[arm], times)


# -- tables ---------------------------------------------------------------------------------------

_FLOORED = "seconds with the floor"
_QUANTITIES = {
    "time at the ceilings": lambda counts: _both(counts, "seconds"),
    "with the floor": lambda counts: _both(counts, _FLOORED),
    "bytes": _bytes,
    "kernels": _kernels,
    "waits of the host": lambda counts: counts["host"]["syncs"],
}


def _losses(counted: Counted) -> Table:
    """Where ours asks for more than compile + autocast does."""
    rows = []
    for name, model, arms in _models(counted):
        peer = arms[AUTOCAST.name]
        for arm in (arm.name for arm in OURS if arm.name in arms):
            more = []
            for what, of in _QUANTITIES.items():
                ours, theirs = of(arms[arm]), of(peer)
                if ours > 1.0005 * theirs:
                    plain = what in ("kernels", "waits of the host")
                    more.append(f"{ours - theirs:+.0f}" if plain else f"{ours / theirs - 1:+.1%}")
                else:
                    more.append("")
            if any(more):
                rows.append((f"{name.upper()}, {model}", arm, *more))
    columns = ("", "arm", *_QUANTITIES)
    return Table(f"Where ours asks for more than {AUTOCAST.name}", columns, rows)


def _ratios(counted: Counted) -> Iterator[Table]:
    for name, models in counted.items():
        arms = [a.name for a in ARMS if all(a.name in found for found in models.values())]
        ours = [arm for arm in arms if arm not in (FP32.name, AUTOCAST.name)]
        for times, how in (("seconds", ""), (_FLOORED, f", no kernel below {FLOOR * 1e6:g} us")):
            rows = [
                (model, *(f"{_faster(found, arm, times):.3f}x" for arm in ours))
                for model, found in models.items()
            ]
            title = f"{name.upper()}: times as fast as {AUTOCAST.name}, at the ceilings{how}"
            yield Table(title, ("", *ours), rows)


def _table(name: str, model: str, arms: dict[str, Counts]) -> Table:
    batch = next((case.batch[name] for case in CASES if case.name == model), None)
    rows = []
    for arm, counts in arms.items():
        model_part, step = PARTS
        tf32 = _both(counts, "seconds with TF32")
        seconds = _both(counts, "seconds")
        rows.append(
            (
                arm,
                f"{_kernels(counts, model_part):.0f} + {_kernels(counts, step):.0f}",
                f"{_both(counts, 'short kernels'):.0f}",
                f"{_both(counts, 'cast kernels'):.0f}",
                *(f"{counts[model_part][f'{kind} bytes'] / 1e9:.2f}" for kind in KINDS),
                f"{_bytes(counts, step) / 1e9:.2f}",
                f"{_both(counts, 'cast bytes') / 1e9:.2f}",
                f"{_both(counts, 'torch.float16 FLOPs') / 1e12:.3f}",
                f"{_both(counts, 'torch.float32 FLOPs') / 1e12:.3f}",
                f"{counts['host']['syncs']:.0f}",
                f"{1e3 * counts[step]['seconds']:.2f}",
                f"{1e3 * seconds:.2f}" + (f" ({1e3 * tf32:.2f})" if tf32 < 0.999 * seconds else ""),
                f"{_faster(arms, arm):.3f}x",
                f"{1e3 * _both(counts, _FLOORED):.2f}",
                f"{_faster(arms, arm, _FLOORED):.3f}x",
            )
        )
    columns = (
        "", "kernels: model + step", "short", "casts only", "GB: generated", "products", "other",
        "the step", "of all, casts only", "TFLOP in FP16", "in FP32", "waits", "ms: the step",
        "all (with TF32)", "over autocast", "with the floor", "over autocast, with the floor",
    )  # fmt: skip
    size = f", B{batch}" if batch else ""
    return Table(f"{name.upper()}: {model}{size}", columns, rows)


def _verdicts(counted: Counted) -> Claims:
    for arm in OURS:
        compared = [
            (arms, f"{model} on {name.upper()}")
            for name, model, arms in _models(counted)
            if arm.name in arms
        ]
        if not compared:
            continue
        for times, how in (("seconds", ""), (_FLOORED, " with the floor")):
            least, where = min((_faster(arms, arm.name, times), at) for arms, at in compared)
            claim = f"{arm.name} is nowhere below autocast at the ceilings{how}"
            yield f"{claim}: {least:.3f}x at worst, {where}", least >= 1.0
        more, where = max(
            (_kernels(arms[arm.name]) - _kernels(arms[AUTOCAST.name]), at) for arms, at in compared
        )
        claim = f"{arm.name} nowhere takes more kernels than autocast"
        yield f"{claim}: {more:+.0f} at most, {where}", more <= 0
    waits = [
        arms[arm.name]["host"]["syncs"]
        for _, _, arms in _models(counted)
        for arm in OURS
        if arm.generated and arm.name in arms
    ]
    for name, model, arms in _models(counted):
        checked = arms[AUTOCAST.name].get("layers")
        if checked:
            apart = checked["apart"]
            claim = f"{model} on {name.upper()}: layers add up exactly, at {CHECKED} of them"
            yield f"{claim}: {apart:.1e} apart", apart < 1e-6
    yield "with an MPOptimizer the host waits for nothing", not any(waits)


def _notes() -> list[str]:
    ceilings = "; ".join(
        f"{sheet(name).name}: {sheet(name).bandwidth / 1e12:g} TB/s, products at "
        f"{sheet(name).low / 1e12:g} TFLOP/s in FP16, {sheet(name).fp32 / 1e12:g} in FP32"
        for name in GPUS
    )
    return [
        "Nothing here was measured. The third training step is counted: forward, backward, the "
        "optimizer's step, `zero_grad` (which launches nothing). A kernel's time is the larger of "
        "its bytes over the bandwidth and its FLOPs over the rate, a step's the sum over its "
        f"kernels. {ceilings} (data sheets, `benchmarks/cuda_parts/inductor.py`). TF32 runs at "
        "half of FP16's rate where it exists, which is not on a T4; torch's default has it on in "
        "convolutions and off in matrix products, and the time with it in both stands in brackets.",
        "Bytes of a generated kernel: each buffer that it reads or writes, once, by Inductor's own "
        "count. Of a library's kernel (products with their attention; other): operands and "
        "results. FLOPs by torch's formulas, where a causal attention counts as a full one. AdamW "
        "is torch's fused one: 28 bytes for each parameter, 32 under a GradScaler, whose own pass "
        "over the gradients moves 8; ours without an MPOptimizer has the same. "
        "Casts only: kernels that do nothing but change dtypes, and pad. Waits: where the host "
        "reads a value from the device.",
        f"The floor: every kernel, however short, takes {FLOOR * 1e6:g} us, about what a GPU needs "
        "from one kernel of a CUDA graph to the next. So the columns without it say what the bytes "
        "and FLOPs take, as if kernels cost nothing; those with it say what a step takes where "
        "CUDA graphs hide all of the host's work. Without CUDA graphs each launch costs the host "
        "several microseconds, which counts where the GPU waits for it: in no column. Short "
        "kernels: those below the floor.",
        "Around a convolution in FP16 whose images are not channels-last, the transposes are "
        "counted that cuDNN makes for Tensor Cores, by NVIDIA's guide to convolutions: each image "
        "that it reads and each that it returns, once. Most images of DCGAN are of that kind in "
        "the arm of autocast; ours are laid out beforehand, in kernels that are counted, too.",
        "All of ours start at GradScaler's scale. By default the scale is searched for in the "
        "first step, which runs backwards more than once; from then on a step is as those counted "
        "here. A generated step reads the scale in every "
        "eighth, in three copies of a number; the one counted is none of these. A parameter of the "
        "stand-in can't change its class, by which a GPU's says whether its copy must be written "
        "again: it is taken to say no.",
        "All in FP16 without dropout, which would add the same masks to every arm. DLRM's 26 "
        "tables have 1000 rows each, so that its products count. DCGAN's step is PyTorch's "
        "tutorial's: three backwards, two optimizers, losses outside of what is compiled. Batches "
        "are such as fit each GPU.",
        f"GPT-2 and BERT are counted at {COUNTED[0]} and {COUNTED[1]} layers, and each two more "
        f"add what the second two did; a count at {CHECKED} layers checks that, in the arm of "
        "autocast (see the targets). How lists of tensors are cut into kernels adds up to one "
        "more or less a list. ViT's layers don't add up: it is counted whole, as others are.",
        "What this can't see: how near to these ceilings cuBLAS, cuDNN and Triton's kernels come; "
        "what a launch costs, and CUDA graphs, which hide that; what the L2 cache saves between "
        "kernels, and a second read of what did not fit; kernels that run side by side; products "
        "that are slow because their sizes are no multiples of 8. "
        "Inductor's padding of products, which is decided by timing, is off: on a GPU autocast "
        "would pad GPT-2's head, which costs it a copy, or run it slower.",
    ]
