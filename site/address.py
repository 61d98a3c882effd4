"""A hook of mkdocs: what needs the project's address, which stands in pyproject.toml alone.

    [project.urls]
    Repository = "https://..."      the link of each page, the badge of the home page
    Documentation = "https://..."   addresses, and a menu of the versions that `mike` deploys

As long as there are no such lines, the site has none of these.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the addresses of the site and of the repository."""
    project = Path(config.config_file_path).with_name("pyproject.toml")
    urls = tomllib.loads(project.read_text())["project"].get("urls", {})
    if "Repository" in urls:
        config.repo_url, config.repo_name = urls["Repository"].rstrip("/"), "Repository"
    if "Documentation" in urls:
        config.site_url = urls["Documentation"]
        config.extra["version"] = {"provider": "mike"}
    return config


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the badge of the last CI run on the home page."""
    if page.file.src_uri != "README.md" or not config.repo_url:
        return markdown
    runs = f"{config.repo_url}/actions/workflows/ci.yml"
    return markdown.replace("\n", f"\n\n[![CI]({runs}/badge.svg)]({runs})\n", 1)
