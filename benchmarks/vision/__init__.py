"""torchvision's models in FP16: gradients against FP64, graphs, fallbacks, sizes that change.

Detectors, which are called with lists and choose boxes by value; segmentation; two heads beside the
main one (GoogLeNet, Inception); pairs of images (RAFT); clips. All have random weights. Their
images are small, and so are the models where torchvision's constructors let them be: the detectors
with a feature pyramid have four residual blocks, Swin, MViT, DenseNet and R3D two to four; the
others are as torchvision ships them. Dropout and stochastic depth are off, and detectors keep all
boxes and anchors, so that no rounding chooses others (`benchmarks/zoo/torchvision_models.py`).

The judge is that of the zoo (`benchmarks/zoo/`, whose report says what an error, a ratio and a
fault are), with two draws of weights and batch, and behind them one more for each of ten other
sizes of images (SSD: three sizes; of one size each: two more for Inception, whose auxiliary head
takes no small images, and ten for MViT and Swin). *Further off* means: in each of all these draws.
SSD, Inception and DeepLab run in BF16, without a GradScaler; the others in FP16. Where autocast's
error is about 1 or more, as in Inception at its initial weights, no way computes the gradient, and
the row compares nothing but graphs.

"compile + autocast" is torch.compile (`backend="aot_eager"`) under torch.autocast with a
GradScaler; "compile FP32" is torch.compile alone. Graphs count those that Dynamo compiled, anew for
other sizes, too. A frame is a function that Dynamo leaves to Python; one that torch.compile doesn't
leave is a fault, and so are more graphs over all sizes than torch.compile makes.
"""

from __future__ import annotations

from importlib.metadata import version

from benchmarks.harness.record import environment
from benchmarks.harness.report import SCRATCH, Report, Settings, paragraphs
from benchmarks.zoo.pieces import installed, measure_each

from .report import make_report

__all__ = ["DEVICES", "NEEDS", "run"]

DEVICES = ("cpu",)
NEEDS = ("torchvision",)

DRAWS = 2
QUICK = ("torchvision/retinanet", "torchvision/swin")
_PIECE = 2


def run(settings: Settings) -> Report:
    """Measure every model, in as many processes as there are cores; under `settings.quick` two,
    drawn once. Rows are kept in `benchmarks/scratch/` as the zoo keeps them.
    """
    record = {**environment(settings.device), "torchvision": version("torchvision")}
    names = installed(["torchvision"])
    if settings.quick:
        rows = measure_each([name for name in names if name in QUICK], draws=1)
    else:
        kept = SCRATCH / "vision_rows.jsonl"
        rows = measure_each(names, DRAWS, kept=kept, commit=record["commit"], piece=_PIECE)
    return make_report(f"vision_{settings.device.type}", paragraphs(__doc__), rows, record)
