"""How the ranks of ``verify`` are started: forked where torch can run in forks, else spawned."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


def start_method(step: Callable[..., Any]) -> str:
    """Return how ranks that run ``step`` are started: ``"fork"``, or else ``"spawn"``.

    A fork inherits ``step``, whatever it is; a spawned process imports ``step`` by its name. Ranks
    are spawned if CUDA is in use in this process, or if torch has devices and this process has run
    a backward: autograd's engine then has threads for devices, which a fork doesn't get, so it
    refuses to run in a fork (https://github.com/pytorch/pytorch/wiki/Autograd-and-Fork).

    Raises:
        RuntimeError: ranks have to be spawned and cannot import ``step``.
    """
    if torch.cuda.is_initialized():
        reason = "CUDA is in use in this process"
    elif not _forks_run_backward():
        reason = "this process has run a backward, which torch then cannot run in its forks"
    else:
        return "fork"
    why = _why_not_imported(step)
    if why:
        raise RuntimeError(
            f"verify: ranks cannot be forked, because {reason}; and they cannot import the step "
            f"{step!r} in new processes: {why}.\n"
            "  Call verify before the first backward and before anything uses a GPU; or define the "
            "step at the top level of a module; or run `python -m consistent verify FILE`."
        )
    return "spawn"


def _forks_run_backward() -> bool:
    """Return whether a fork of this process can run backward; found out by trying."""
    fork = multiprocessing.get_context("fork").Process(target=_try_backward, daemon=True)
    fork.start()
    fork.join()
    return fork.exitcode == 0


def _try_backward() -> None:
    """Run a backward and end this process, with status 0 if autograd's engine ran it."""
    try:
        torch.ones((), requires_grad=True).backward()
    except RuntimeError:
        os._exit(1)
    os._exit(0)


def _why_not_imported(step: Callable[..., Any]) -> str:
    """Return why a new process could not import ``step``; "" if it can."""
    by_name = getattr(step, "__module__", None)
    if by_name == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
        return "it is defined in a notebook or at a prompt"
    try:
        ForkingPickler.dumps(step)
    except Exception as error:  # pickle raises errors of several classes
        return str(error)
    return ""
