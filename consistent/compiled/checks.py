"""What a compiled step may be asked for."""

from __future__ import annotations

import importlib.util
from typing import Any

from ..spec.nearest import suggestion
from . import captured
from .backend import BACKENDS


def check_backend(what: str, backend: str) -> None:
    """Raises ValueError if no backend is called so."""
    if backend not in BACKENDS:
        near, known = suggestion(backend, BACKENDS), ", ".join(BACKENDS)
        raise ValueError(f"{what}: backend is {backend!r}.{near} Give one of {known}.")


def check_overlap(what: str, overlap: Any) -> None:
    """Raises ValueError if it is none of True, False and "auto"."""
    if overlap not in (True, False, "auto"):
        raise ValueError(f'{what}: overlap is {overlap!r}. Give True, False or "auto".')


def check_fuse(what: str, fuse: Any) -> None:
    """Raises ValueError if it is none of True, False and "auto"."""
    if fuse not in (True, False, "auto"):
        raise ValueError(f'{what}: fuse is {fuse!r}. Give True, False or "auto".')


def check_cuda_graph(what: str, cuda_graph: Any) -> None:
    """Raises ValueError if it is neither True nor False, or cannot be had here."""
    if cuda_graph not in (True, False):
        raise ValueError(f"{what}: cuda_graph is {cuda_graph!r}. Give True or False.")
    if cuda_graph and (why := captured.capturer.why_not()):
        raise ValueError(
            f"{what}: cuda_graph is True, and {why}.\n  Only a GPU captures what it runs.\n"
            "  Leave it out, or give cuda_graph=torch.cuda.is_available()."
        )


def check_memory(what: str, memory: Any) -> None:
    """Raises ValueError if it is no number of bytes."""
    if memory is not None and (type(memory) is not int or memory < 0):
        raise ValueError(f"{what}: memory is {memory!r}. Give a whole number of bytes, or None.")


def check_layouts(what: str, layouts: Any) -> None:
    """Raises ValueError if it is neither "auto" nor None, ImportError without scipy."""
    if layouts not in (None, "auto"):
        raise ValueError(f'{what}: layouts is {layouts!r}. Give "auto" or None.')
    if layouts == "auto" and importlib.util.find_spec("scipy") is None:
        raise ImportError(
            f'{what}: layouts="auto" is solved by scipy, and scipy is not installed.\n'
            "  pip install scipy, or pip install consistent[auto]; or leave layouts= out."
        )
