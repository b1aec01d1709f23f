"""Writing a page or a trace."""

from __future__ import annotations

from pathlib import Path


def write(path: str | Path, text: str) -> Path:
    """Write ``text`` to ``path``; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8", errors="backslashreplace")
    return target


def check_page_path(path: str | Path) -> None:
    """Raises ValueError if the name of a page that ``show`` writes does not end in .html."""
    suffix = Path(path).suffix
    if suffix.lower() not in (".html", ".htm"):
        raise ValueError(
            f"show: {str(path)!r} ends in {suffix or 'no suffix'!r}, and what is written is "
            'an HTML page. Write .show("step.html").'
        )
