"""A torch function's name does not depend on which of its equals was met first."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.rules import find_row


@pytest.mark.parametrize("place", [torch, torch.Tensor, torch._C._nn])
def test_functions_that_are_equal_as_keys_have_one_row(place: Any) -> None:
    equals: dict[Callable[..., Any], list[Callable[..., Any]]] = defaultdict(list)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [getattr(place, name, None) for name in dir(place)]
    for func in found:
        if callable(func) and hasattr(func, "__name__") and func.__class__ is not type:
            equals[func].append(func)
    for same in equals.values():
        rows = {row.names if row else None for row in (find_row(resolve(f).name) for f in same)}
        assert len(rows) == 1, [f.__name__ for f in same]
