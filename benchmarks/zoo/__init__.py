"""Hugging Face's architectures and timm's, in FP16: gradients against FP64, graphs, fallbacks.

Every model is small, with random weights and biases, and deliberately odd sizes (hidden 36 in three
heads, 101 words, 13 tokens, images of 33 or 65 pixels where the architecture takes them). It takes
one training step for each of seven draws of weights and batch: compiled by torch.compile in FP32,
under torch.autocast with a GradScaler, wholly in FP16 with a GradScaler ("pure half": the
parameters cast, the model run eagerly), and by mpcompile at O1 and O2 with `emit="aot_eager"` and a
plain optimizer. Dropout is off.

The error of a gradient is the norm of its difference from the same model's in FP64, over the norm
of the latter, all parameters together. The worst parameter is measured alike; one whose gradient is
less than 2^-10 of the whole (FP16's rounding) is measured against that part, because exact
arithmetic may make it zero. A ratio is the median over the draws of (error of ours / error of the
peer) within a draw. *Further off* means: in each of the seven draws, by more than roundings to FP32
explain (twice the error of the compiled FP32 model). If neither of two errors tends to be larger,
that happens by chance in one of 128 rows.

Graphs are those that Dynamo made, over all draws. A fault is an error, a graph left in FP32, a
warning of mpcompile's, more graphs than torch.compile makes, a frame left to Python that
torch.compile traces, gradients further off at O1 than autocast's, or at O2 than pure half's, which
stores what O2 stores. How O2 compares with autocast
has its own columns: O2 stores in FP16 what autocast keeps in FP32, such as the residual stream and
the results of norms. That is what O2 is, and it costs accuracy.

O1 rounds where autocast does, but for three things: one cast serves all products that read it, so
that their gradients are summed in FP16; a cast comes before a view that repeats the heads of an
attention, so that the gradients of these heads are summed in FP16; and operators between products
have the dtype that the planner gives them.
"""

from __future__ import annotations

from benchmarks.harness.report import Report, Settings, paragraphs
from benchmarks.zoo.catalogue import rows_of
from benchmarks.zoo.report import LEAST, make_report

__all__ = ["DEVICES", "run"]

DEVICES = ("cpu",)
"""How far roundings carry is the same everywhere; a GPU would only launch small kernels."""

DRAWS = 7
QUICK = ("transformers/bert", "timm/vit_tiny")


def run(settings: Settings) -> Report:
    """Measure every model, in as many processes as there are cores; under `settings.quick` two,
    drawn once. Rows are kept in `benchmarks/scratch/` as they come, and a later run at the same
    commit goes on from there.
    """
    rows = rows_of("zoo", LEAST, DRAWS, QUICK, quick=settings.quick)
    return make_report(paragraphs(__doc__), rows)
