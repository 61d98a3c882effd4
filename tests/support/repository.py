"""The repository's own files: where they lie, and the sources of the package."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpcompile"
PASSES = ROOT / "passes"
SUPPORT = ROOT / "tests" / "support"


def sources() -> list[Path]:
    ours = [p for p in PACKAGE.rglob("*.py") if not p.is_relative_to(PACKAGE / "passes")]
    return sorted([*ours, *PASSES.rglob("*.py")])
