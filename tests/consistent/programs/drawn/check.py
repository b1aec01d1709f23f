"""Programs drawn from a seed, with what real ones do beside computing: functions of the user's own,
writes through views in every grad mode, errors that are caught, tied weights in stages, batches of
dicts and texts. Each runs on plain and on global tensors.

``check(rank, seed, grid, kinds)`` runs one on a rank of a pool; ``benchmarks/drawn_programs.py``
runs thousands.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from consistent import Placement
from tests.twins import Laid, assert_same

from .caught import caught, caught_in_backward
from .functions import function
from .models import batches, stages, training
from .steps import Steps, compute
from .writes import write

RIGHT, ERROR, DIFFERENT, DROPPED = "right", "error", "different", "dropped"
Outcome = tuple[str, str]


def check(rank: int, seed: int, grid: Any, kinds: Sequence[str]) -> Outcome:
    """What comes of the program of ``seed`` on the ranks of ``grid``."""
    kind = random.Random(seed).choice(kinds)
    try:
        wanted = _run(kind, seed, Laid(None))
    except Exception as error:
        return _refused(kind, seed, grid, error)
    try:
        given = _run(kind, seed, Laid(Placement("cpu", grid)))
        assert_same(given, wanted, rtol=1e-6, atol=1e-8)
    except AssertionError as error:
        return DIFFERENT, f"{kind} {seed}: {error}"
    except Exception as error:
        return ERROR, f"{kind} {seed}: {type(error).__name__}: {error}"
    return RIGHT, kind


def _refused(kind: str, seed: int, grid: Any, error: Exception) -> Outcome:
    """What torch refuses must not give a value, but for writes into one view of several, which is
    right here."""
    if "returns multiple views" in str(error):
        return DROPPED, f"{kind} {seed}: {error}"
    try:
        _run(kind, seed, Laid(Placement("cpu", grid)))
    except Exception:
        return DROPPED, f"{kind} {seed}: {error}"
    return DIFFERENT, f"{kind} {seed}: one process raises {type(error).__name__}: {error}"


def _run(kind: str, seed: int, at: Laid) -> Any:
    torch.manual_seed(seed)
    return KINDS[kind](random.Random(seed), at)


def _steps(*statements: Callable[[Steps], None]) -> Callable[[random.Random, Laid], Any]:
    return lambda rng, at: Steps(rng, at).run(statements, rng.randint(2, 6))


KINDS: dict[str, Callable[[random.Random, Laid], Any]] = {
    "functions": _steps(compute, function, function),
    "writes": _steps(compute, write, write),
    "caught": _steps(compute, caught, caught, caught_in_backward),
    "mixed": _steps(compute, function, write, caught),
    "mixed without errors": _steps(compute, function, write),
    "training": training,
    "stages": stages,
    "batches": batches,
}
