"""The table as a page: `python tests/support/operators_page.py > docs/operators.md`."""

import dataclasses
import enum
import inspect
import re
import textwrap
from itertools import groupby

from mpcompile.rules.policy import Precision
from mpcompile.rules.rule import Rule
from mpcompile.rules.table import TABLE

_TITLE = "# What is known about operators"
_ABOUT = (
    "The table in `mpcompile/rules/`, printed by `python tests/support/operators_page.py`. An "
    "operator stands in one row, with all its overloads. One that is not on this page keeps the "
    "dtypes that it was captured with. `mpcompile.register_rule` adds a row for an operator of "
    "your own, with any of these facts:"
)
_PRECISIONS = {
    Precision.LOW: "LOW: runs in half precision",
    Precision.FULL: "FULL: runs in FP32",
    Precision.FOLLOW: "FOLLOW: runs in either; the planner decides",
    Precision.KEEP: "KEEP: keeps the dtypes that the program names",
}


def page() -> str:
    """The table as Markdown: a section for each precision, a paragraph for each reason, a line for
    each set of facts.
    """
    parts = [_TITLE, "", _filled(_ABOUT, ""), "", _legend()]
    for precision, title in _PRECISIONS.items():
        parts.append(f"\n## {title}\n")
        rows = [(key, rule) for key, rule in TABLE.items() if rule.precision is precision]
        for reason, group in groupby(rows, key=lambda row: row[1].reason):
            parts.append(f"\n**{reason[0].upper()}{reason[1:]}.**\n")
            parts += [_line(keys, facts) for facts, keys in _by_facts(list(group)).items()]
    return "\n".join(parts) + "\n"


def _legend() -> str:
    """The meaning of each fact: the attributes of `Rule`, from its docstring."""
    text = inspect.getdoc(Rule) or ""
    paragraphs = text.partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", paragraphs, re.S | re.M)
    lines = (f"* `{name}`: {' '.join(meaning.split())}" for name, meaning in entries)
    return "\n".join(_filled(line) for line in lines) + "\n"


def _by_facts(rows: list[tuple[str, Rule]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, rule in rows:
        found.setdefault(_facts(rule), []).append(key.removeprefix("aten::"))
    return found


def _facts(rule: Rule) -> str:
    """The facts of a rule that differ from their defaults, without precision and reason."""
    said = []
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.name in ("precision", "reason") or value == field.default:
            continue
        if value is True:
            said.append(field.name)
        elif value is False:
            said.append(f"not {field.name}")
        elif isinstance(value, enum.Enum):
            said.append(f"{field.name}: {value.value}")
        elif dataclasses.is_dataclass(value):
            said.append(field.name)
        else:
            said.append(f"{field.name}: `{value}`")
    return "; ".join(said)


def _line(keys: list[str], facts: str) -> str:
    names = ", ".join(f"`{key}`" for key in keys)
    text = f"{names}: {facts}" if facts else names
    return _filled(f"* {text}")


def _filled(text: str, indent: str = "  ") -> str:
    return textwrap.fill(text, 110, subsequent_indent=indent,
                         break_long_words=False, break_on_hyphens=False)  # fmt: skip


if __name__ == "__main__":
    print(page(), end="")
