"""Writing a page, a picture or a trace."""

from __future__ import annotations

from pathlib import Path

from mirrored import whole_files


def write(path: str | Path, text: str | bytes) -> Path:
    """Write ``text`` to ``path``, whole or not at all; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
    whole_files.write(target, data)
    return target


def check_page_path(path: str | Path) -> None:
    """Raises ValueError if the name of a page that ``show`` writes does not end in .html."""
    suffix = Path(path).suffix
    if suffix.lower() not in (".html", ".htm"):
        raise ValueError(
            f"show: {str(path)!r} ends in {suffix or 'no suffix'!r}, and what is written is "
            'an HTML page. Write .show("step.html").'
        )
