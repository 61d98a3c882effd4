"""The reference names everything public, and the site's folder holds what the site is made of.

That the site builds, and that no link in it is broken, is what `make docs` finds out.
"""

import importlib
import re

import pytest
from documents import DOCUMENTS
from repository import ROOT

import mpcompile
import mpcompile.diagnosis
import mpcompile.plans

API = ROOT / "docs" / "api"
SITE = ROOT / "site"
ENTRIES = sorted(
    entry
    for page in API.glob("*.md")
    for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)
)


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_entry_exists_and_says_what_it_is(entry: str) -> None:
    module, _, name = entry.rpartition(".")
    if "integrations" in module:
        pytest.importorskip(
            {"huggingface": "transformers"}.get(module.split(".")[-1], module.split(".")[-1])
        )
    assert getattr(importlib.import_module(module), name).__doc__


@pytest.mark.parametrize("module", [mpcompile, mpcompile.diagnosis, mpcompile.plans])
def test_every_public_name_has_an_entry(module: object) -> None:
    package = vars(module)["__name__"]
    public = set(vars(module)["__all__"]) - {"__version__"}
    if package != "mpcompile":  # what is also imported from the top stands there
        public -= set(mpcompile.__all__)
    assert {f"{package}.{name}" for name in public} <= set(ENTRIES)


def test_the_table_of_pages_names_them_all() -> None:
    table = (API / "README.md").read_text()
    for entry in ENTRIES:
        assert f"`{entry.rpartition('.')[2]}`" in table or "integrations" in entry


def test_the_site_is_the_documents() -> None:
    """Each stands there under its own path, so that the same links hold."""
    for document in DOCUMENTS:
        assert (SITE / document.relative_to(ROOT)).resolve() == document.resolve()
    results = SITE / "benchmarks" / "results"
    assert results.resolve() == (ROOT / "benchmarks" / "results").resolve()
