"""DeepBench's products, convolutions and recurrent layers: FP32 against the low dtype.

The shapes are those of Baidu's DeepBench (training), which talks on mixed precision use as well.
Each is timed as it is named, and once more with every dim that padding looks at one smaller:
matrices 1759 wide in place of 1760. A call is a forward and its backward, in the form in which a
compiled program makes it and a profile measures it. Beside each ratio stands what the planner's
profile of this device says of the same call: it has measured other sizes.
"""

from __future__ import annotations

from benchmarks.harness.record import environment
from benchmarks.harness.report import Report, Settings, paragraphs

from .measure import QUICK, measure_all, work_for
from .report import make_report

__all__ = ["run"]


def run(settings: Settings) -> Report:
    """Time every shape that fits; under `settings.quick` three small ones, once."""
    device = settings.device
    work = QUICK if settings.quick else work_for(device)
    record = environment(device)
    return make_report(device, work, measure_all(work, device), paragraphs(__doc__), record)
