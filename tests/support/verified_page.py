"""What verification found in the sweeps: a page from pytest's own report.

    python tests/support/verified_page.py build/sweep.xml --page tests/verify/cured.md

It ends with 1 where more than 2% of the cases end uncompiled. Without cases in the report, the page
stays as it is.
"""

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

UNCOMPILED = 0.02

HEAD = """\
# What was compiled wrongly, and cured

Of `tests/verify/test_verify_sweep.py` as it was run last (`make sweep`): torch's operators on
operands of 64 x 128 and more, and random programs; in BF16 and in FP16, as far as said below, at O1
or O2, forward and backward.

"""


def outcomes(report: Path) -> list[dict[str, Any]]:
    """What the tests of a report recorded."""
    found = ET.parse(report).iter("property")
    return [json.loads(p.get("value", "")) for p in found if p.get("name") == "verified"]


def page(cases: list[dict[str, Any]]) -> str:
    """Counts; what was cured; what was not verified, and what failed."""
    import torch

    ran = [case for case in cases if not case["failed"]]
    alarms = [(case, wrong, cure) for case in ran for wrong, cure in case["alarms"]]
    kinds = Counter(_kind(case) for case in cases)
    counts = {
        "cases": len(cases),
        **{f"of these {kind}": count for kind, count in sorted(kinds.items())},
        "values that verification found right": sum(case["values"] for case in ran),
        "that prove nothing (constants), or are drawn": sum(case["unclear"] for case in ran),
        "cases with something compiled wrongly": len({id(case) for case, *_ in alarms}),
        "of these false alarms": sum(_is_false(case) for case in ran),
        "that ended uncompiled": len(uncompiled(cases)),
        "cases with a graph that wasn't verified": sum(bool(case["left"]) for case in ran),
        "with values that are drawn at random, not judged": sum(case["random"] for case in ran),
        "with a wrong value in spite of verification": sum(bool(case["wrong"]) for case in ran),
        "that torch can't compile, or eager refuses": len(cases) - len(ran),
    }
    worst = max((case["worst"] for case in ran), default=0.0)
    lines = [f"| {date.today().isoformat()}, torch {torch.__version__} | |", "|---|---:|"]
    lines += [f"| {what} | {count:,} |" for what, count in counts.items()]
    lines += [f"| the largest error of the others, in units of eager's | {worst:.2f} |"]
    lines += ["", "## Cured", "", "| what | how | was wrong | cured by |", "|---|---|---|---|"]
    lines += [_row(case["subject"], case["how"], wrong, cure) for case, wrong, cure in alarms]
    lines += ["", "## Not verified", "", "| graphs | why |", "|---:|---|"]
    left = Counter(why for case in ran for why in case["left"])
    lines += [_row(str(count), why) for why, count in left.most_common()]
    lines += ["", "## Failed", "", "| what | how | error |", "|---|---|---|"]
    lines += [_row(c["subject"], c["how"], c["failed"]) for c in cases if c["failed"]]
    return HEAD + "\n".join(lines) + "\n"


def uncompiled(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases of which a graph ended operator by operator."""
    return [case for case in cases if any(cure == "uncompiled" for _, cure in case["alarms"])]


def _kind(case: dict[str, Any]) -> str:
    what = "random programs" if str(case["subject"]).startswith("program") else "operators"
    return f"{what} in {case['how'].split()[0]}"


def _is_false(case: dict[str, Any]) -> bool:
    return bool(case["alarms"]) and case["right_unverified"] is True


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, required=True)
    given = parser.parse_args()
    if cases := [case for report in given.reports for case in outcomes(report)]:
        given.page.write_text(page(cases))
        if len(uncompiled(cases)) > UNCOMPILED * len(cases):
            sys.exit(f"{len(uncompiled(cases))} of {len(cases)} cases end uncompiled")


if __name__ == "__main__":
    main()
