"""Why FP16 training needs FP32 master weights and loss scaling, one left out at a time.

Both are the ablations of "Mixed Precision Training" (Micikevicius et al., ICLR 2018, sections 3.1
and 3.2), made small: perceptrons on scikit-learn's digits, plain torch.optim, the same seeds and
the same batches for every arm.

*Master weights.* A classifier learns with SGD and a small learning rate, so that most updates are
less than 2^-11 of their weight. An FP16 number has 11 significant bits: adding such an update
rounds back to the weight. The two FP16 arms differ in one thing, whether weights are rounded to
FP16 when training starts and after each update. The update itself is computed in FP32 in both.

*Loss scaling.* An autoencoder learns with Adam; its loss, a mean over 2^13 outputs, is multiplied
by 2^-11. That makes gradients as small as a mean over 2^24 outputs does (64 images of 512 x 512
pixels), or as a side loss of small weight. Adam does not care how large a gradient is, but a zero
stays zero. Its epsilon is 1e-12: the default is larger than many of these gradients, even in FP32.
The histogram is of the gradients of all layers' outputs, in the FP32 runs. From it follows what
share FP16 rounds to zero: all those below 2^-25 over the loss scale.
"""

from __future__ import annotations

import statistics

from benchmarks.ablations.training import (
    BATCH,
    FP32,
    HALF_WEIGHTS,
    MASTERS,
    SCALES,
    STORAGES,
    UNSCALED,
    Magnitudes,
    Results,
    lost,
    train_scaled,
    train_stored,
)
from benchmarks.harness.report import Report, Settings, Table, paragraphs, plain

DEVICES = ("cpu",)
"""What FP16 can hold is the same everywhere; a GPU would only launch small kernels."""


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` a few steps of one seed."""
    device = settings.device
    seeds = range(1 if settings.quick else 3)
    first, second = (4, 4) if settings.quick else (8000, 600)
    stored = {arm: [train_stored(arm, seed, first, device) for seed in seeds] for arm in STORAGES}
    gradients = Magnitudes()
    scaled = {FP32: [train_scaled(FP32, seed, second, device, gradients) for seed in seeds]}
    for arm in SCALES:
        scaled[arm] = [train_scaled(arm, seed, second, device) for seed in seeds]
    notes = [
        *paragraphs(__doc__),
        f"Steps: {first} and {second}, of {BATCH} images. Seeds: "
        f"{', '.join(map(str, seeds))}. Losses are over held-out digits, by an eager FP32 "
        "forward. Figure: docs/figures/ablations.svg, which `python -m benchmarks.figures` draws.",
    ]
    return Report(
        title="What master weights and loss scaling are for",
        notes=notes,
        tables=[
            _table("Without master weights", stored),
            _table("Without loss scaling", scaled),
            _lost_table(gradients),
        ],
        verdicts={**stored_verdicts(stored), **scaled_verdicts(scaled)},
        data={
            "master weights": plain(stored),
            "loss scaling": plain(scaled),
            "activation gradients, share by octave": gradients.shares(),
        },
    )


# -- report ----------------------------------------------------------------------------------------
# Verdicts and tables.


def _table(title: str, results: Results) -> Table:
    names = list(results[FP32][0].shares)
    rows = [
        (
            arm,
            f"{statistics.fmean(outcome.before for outcome in outcomes):.4f}",
            " ".join(f"{outcome.after:.4f}" for outcome in outcomes),
            *(f"{statistics.fmean(o.shares[name] for o in outcomes):.1%}" for name in names),
            " ".join(str(outcome.skipped_steps) for outcome in outcomes),
        )
        for arm, outcomes in results.items()
    ]
    columns = ("arm", "loss before", "loss after, by seed", *names, "skipped steps")
    return Table(title, columns, rows)


def _lost_table(gradients: Magnitudes) -> Table:
    shares, scales = gradients.shares(), (1.0, 8.0, 128.0, 2.0**16)
    rows = [(f"{scale:g}", f"{lost(shares, scale):.1%}") for scale in scales]
    return Table(
        "Gradients of layers' outputs that round to zero in FP16", ("loss scale", "share"), rows
    )


def stored_verdicts(results: Results) -> dict[str, bool]:
    """Judged by progress, the fall of the held-out loss, against the FP32 run of the same seed."""
    ratios = {
        arm: [o.progress / full.progress for o, full in zip(outcomes, results[FP32], strict=True)]
        for arm, outcomes in results.items()
    }
    return {
        f"{MASTERS}: progress within 2% of FP32's": all(0.98 < x < 1.02 for x in ratios[MASTERS]),
        f"{HALF_WEIGHTS}: less than a quarter of FP32's progress": all(
            x < 0.25 for x in ratios[HALF_WEIGHTS]
        ),
    }


def scaled_verdicts(results: Results) -> dict[str, bool]:
    """Judged by the held-out loss in the end, against the FP32 run of the same seed."""
    ratios = {
        arm: [o.after / full.after for o, full in zip(outcomes, results[FP32], strict=True)]
        for arm, outcomes in results.items()
    }
    return {
        f"{UNSCALED}: at least twice the loss of FP32": all(x > 2 for x in ratios[UNSCALED]),
        **{
            f"{arm}: loss within 10% of FP32's": all(0.9 < x < 1.1 for x in ratios[arm])
            for arm in SCALES
            if arm != UNSCALED
        },
    }
