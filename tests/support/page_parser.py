"""The page of a plan or of a report, read as HTML, and what no page may do."""

import json
import re
from html.parser import HTMLParser
from typing import Any


class Page(HTMLParser):
    """Reads a page: its tags, its attributes by tag, its text, and the data in it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.script = False
        self.data: Any = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.script = ("type", "application/json") in attrs

    def handle_data(self, data: str) -> None:
        if self.script:
            self.data = json.loads(data)
            self.script = False
        else:
            self.texts.append(data.strip())


def unharmed(html: str, evil: str) -> Page:
    """The page, in which this text, a name of something, is no markup."""
    page = Page(html)
    assert evil not in html
    assert "img" not in page.tags
    assert page.tags.count("script") == 2
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    return page


def assert_loads_nothing(html: str) -> None:
    (policy,) = re.findall(r'content="(default-src[^"]*)"', html)
    assert re.fullmatch(r"default-src 'none'; style-src '\S+'; script-src '\S+'", policy)
    assert "unsafe" not in policy
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://|innerHTML""", html)
