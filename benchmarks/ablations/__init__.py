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

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs

from .fp16 import Magnitudes
from .report import make_report
from .training import BATCH, FP32, SCALES, STORAGES, train_scaled, train_stored

__all__ = ["DEVICES", "run"]

DEVICES = ("cpu",)
"""What FP16 can hold is the same everywhere; a GPU would only launch small kernels."""


def run(settings: Settings) -> Report:
    """Train everything; under `settings.quick` a few steps of one seed."""
    device = settings.device
    record = environment(device)
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
        "forward. Figure: docs/figures/ablations.svg.",
    ]
    return make_report(f"ablations_{device.type}", notes, stored, scaled, gradients, record)
