"""What `make docs` does beside mkdocs: links out of docs/ must lead to something."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OUT = re.compile(r"\[([^\]]+)\]\(((?:\.\./|seeds)[^)#]*)\)")
_log = logging.getLogger("mkdocs.hooks.links")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository that are not pages become their text."""

    def text_of(match: re.Match[str]) -> str:
        here = ROOT / "docs" / Path(page.file.src_uri).parent
        target = (here / match[2]).resolve()
        if target.suffix == ".md" and target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            _log.warning("%s links to %s, which does not exist", page.file.src_uri, match[2])
        return match[1]

    return _OUT.sub(text_of, markdown)
