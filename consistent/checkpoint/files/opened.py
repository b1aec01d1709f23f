"""Opening a checkpoint of any of the formats that are read."""

from __future__ import annotations

import os

from . import index as index_file
from .reader import Reader, ours


def opened(path: str) -> Reader:
    """A reader of this file or folder.

    Raises:
        FileNotFoundError: it holds no checkpoint.
        ValueError: it is damaged.
    """
    if os.path.isfile(os.path.join(path, index_file.NAME)):
        return ours(path)
    raise FileNotFoundError(f"{path} holds no checkpoint.")
