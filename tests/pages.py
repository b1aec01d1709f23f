"""Reading the HTML pages that the library writes."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

_ALONE = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """What is on a page.

    ``tables`` has the rows of each table by its id (its class, where it has none), a row being the
    texts of its cells; ``text`` is all that is read, ``data`` what a timeline draws.

    Raises:
        AssertionError: the page loads something, or tags do not fit together.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.marked: list[str] = []  # rows that box
        self.data: Any = None
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._words: list[str] = []
        self.feed(text)
        assert not self._open, self._open
        assert "url(" not in text and "@import" not in text and "://" not in text

    @property
    def text(self) -> str:
        return " ".join(" ".join(self._words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert tag != "link" and not {"src", "href"} & set(found), (tag, found)
        if tag in _ALONE or tag in ("path", "rect") and not self._open:
            return
        self._open.append((tag, found))
        if tag == "table":
            self._name = found.get("id") or found.get("class") or ""
            self.tables[self._name] = []
        elif tag == "tr":
            self.tables[self._name].append([])
        elif tag in ("td", "th"):
            self.tables[self._name][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        opened, found = self._open.pop()
        assert opened == tag, (opened, tag)
        if tag == "tr" and found.get("class") == "boxes":
            self.marked.append(" ".join(self.tables[self._name][-1]))

    def handle_data(self, data: str) -> None:
        tags = [tag for tag, _ in self._open]
        if "style" in tags:
            return
        if "script" in tags:
            if dict(self._open[-1][1]).get("id") == "events":
                self.data = json.loads(data)
            return
        self._words.append(data)
        if "td" in tags or "th" in tags:
            row = self.tables[self._name][-1]
            row[-1] = " ".join(f"{row[-1]} {data}".split())
