"""What `make docs` does beside mkdocs: every public name must be documented and in the reference,
and links out of docs/ must lead to something."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "consistent": "consistent",
    "consistent.nn": "nn",
    "consistent.data": "data",
    "consistent.checkpoint": "checkpoint",
    "consistent.flow": "flow",
    "mirrored": "mirrored",
}
_OUT = re.compile(r"\[([^\]]+)\]\(((?:\.\./|seeds)[^)#]*)\)")
_log = logging.getLogger("mkdocs.hooks.reference")


def on_pre_build(config: Any) -> None:
    """Warn of each public name that has no docstring or is not in the reference; in a strict build
    a warning is an error."""
    loader = griffe.GriffeLoader(search_paths=[str(ROOT)])
    for name in ("mirrored", "consistent"):
        loader.load(name)
    loader.resolve_aliases(external=False)
    for package, page in PAGES.items():
        text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
        module = loader.modules_collection[package]
        for name in map(str, module.exports or ()):
            if not module[name].has_docstring:
                _log.warning("%s.%s has no docstring", package, name)
            if not re.search(rf"\b{re.escape(package)}\.{name}\b", text):
                _log.warning("%s.%s is not in docs/reference/%s.md", package, name, page)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository that are no pages become their text."""

    def text_of(match: re.Match[str]) -> str:
        here = ROOT / "docs" / Path(page.file.src_uri).parent
        target = (here / match[2]).resolve()
        if target.suffix == ".md" and target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, match[2])
        return match[1]

    return _OUT.sub(text_of, markdown)
