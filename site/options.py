"""For the reference: what `mpcompile.settings.documented` writes into docstrings at the import.

The site is built from the source alone, where torch need not be installed.
"""

from __future__ import annotations

import ast
from typing import Any

import griffe


class Options(griffe.Extension):
    """Replaces `{options}` and `{plans}`."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.plans: list[str] = []

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Read the declarations: fields of `Settings` that a call declares."""
        if cls.path != "mpcompile.settings.Settings":
            return
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Call):
                assert isinstance(line.target, ast.Name)
                texts = [text for text in map(_text, line.value.args) if text]
                self.entries.append(f"{line.target.id}: {max(texts, key=len)}")
                if any(word.arg == "plans" for word in line.value.keywords):
                    self.plans.append(line.target.id)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Write them into the docstrings of the package."""
        assert self.entries, "mpcompile.settings.Settings declares no option"
        for path in ("api.mpcompile", "preview.explain.explain", "preview.explain.plan_for"):
            docstring = pkg[path].docstring
            text = docstring.value.replace("{options}", "\n    ".join(self.entries))
            docstring.value = text.replace("{plans}", ", ".join(self.plans))


def _text(node: ast.AST) -> str:
    """A string; where an f-string joins names of a table, the table."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Call):
        return f"`{ast.unparse(node.value.args[0])}`"
    return ""
