"""A hook of mkdocs: notebooks become pages, so that links from them and to them are checked."""

from __future__ import annotations

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


class Notebook(File):
    """A notebook, which makes a page."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Put a `Notebook` in the place of each notebook."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            files.remove(file)
            files.append(
                Notebook(file.src_uri, config.docs_dir, config.site_dir, config.use_directory_urls)
            )
    return files


def on_page_read_source(page: Page, *, config: MkDocsConfig) -> str | None:
    """A notebook as Markdown: its text, and its code and what that printed in blocks."""
    if not isinstance(page.file, Notebook):
        return None
    parts = []
    for cell in json.loads(Path(str(page.file.abs_src_path)).read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        printed = ["".join(out["text"]) for out in cell.get("outputs", ()) if "text" in out]
        parts += [f"```text\n{text}\n```" for text in printed]
    return "\n\n".join(parts)
