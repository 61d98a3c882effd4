"""The repository's own files: where they lie, and the sources of the package."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mpcompile"
PASSES = ROOT / "passes"
SUPPORT = ROOT / "tests" / "support"


def sources() -> list[Path]:
    ours = [p for p in PACKAGE.rglob("*.py") if not p.is_relative_to(PACKAGE / "passes")]
    return sorted([*ours, *PASSES.rglob("*.py")])


def unit_of(path: Path) -> str:
    """`mpcompile/plans/model_plan.py` -> `"plans"`, `passes/graph/noop_casts.py` -> `"passes"`."""
    if path.is_relative_to(PASSES):
        return "passes"
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted paths below the package that a file imports anywhere: `{"ir", "plans.model_plan"}`.

    A name taken from the package root that is no submodule comes back as `"<root>"`.
    """
    if path.is_relative_to(PASSES):
        package = ["mpcompile", "passes", *path.relative_to(PASSES).parts[:-1]]
    else:
        package = ["mpcompile", *path.relative_to(PACKAGE).parts[:-1]]
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            parts = target.split(".")
            if parts[0] != "mpcompile":
                continue
            below = parts[1:]
            known = below and ((PACKAGE / below[0]).is_dir() or is_file(below[0]))
            found.add(".".join(below) if known else "<root>")
    return found


def is_file(module: str) -> bool:
    return (PACKAGE / f"{module}.py").is_file()
