"""`python -m benchmarks.ablations` draws the figure of what is committed."""

from __future__ import annotations

import json

from benchmarks.harness.report import RESULTS

from .figure import draw_report
from .report import FIGURES

draw_report(FIGURES / "ablations.svg", json.loads((RESULTS / "ablations_cpu.json").read_text()))
