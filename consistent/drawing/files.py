"""Writing of a page, a picture or a trace to a file."""

from __future__ import annotations

from pathlib import Path

from mirrored import whole_files


def write(path: str | Path, text: str | bytes) -> Path:
    """Write ``text`` to ``path`` and return the path; missing folders are created.

    The file is replaced atomically, so readers never see a part of it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    data = text if isinstance(text, bytes) else text.encode("utf-8", "backslashreplace")
    whole_files.write(target, data)
    return target


def check_page_path(path: str | Path) -> None:
    """Raise ValueError if the path for an HTML page does not end in .html or .htm."""
    suffix = Path(path).suffix
    if suffix.lower() not in (".html", ".htm"):
        raise ValueError(
            f"show: {str(path)!r} ends in {suffix or 'no suffix'!r}, and what is written is "
            'an HTML page. Write .show("step.html").'
        )
