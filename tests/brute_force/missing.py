"""Signatures that hold and are not claimed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from consistent.rules import Signature
from consistent.spec import EXTREMES, B, P, S, Sbp, TensorSpec, fits_dtype
from tests.brute_force.expected import Expected
from tests.reference import Tensors, assert_close, join


def missing(func: Callable[..., Any], *args: Any, ranks: int = 3, **kwargs: Any) -> list[Signature]:
    """Signatures on one axis that hold by value with the op run plainly on shards, and are not
    claimed."""
    op = Expected(func, args, kwargs, ranks)
    claimed = {(s.ins, s.outs) for s in op.signatures(0)}
    found = []
    for ins in itertools.product(*(_entries(t) for t in op.tensors)):
        shards = [op.scatter(t, (entry,)) for t, entry in zip(op.tensors, ins, strict=True)]
        given = [[s[rank].clone() for s in shards] for rank in range(ranks)]
        try:
            with torch.no_grad():
                results = [op.results(op.run(tensors), tensors) for tensors in given]
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        for outs in itertools.product(*(_entries(t) for t in op.expected)):
            same = tuple(B if e.is_extreme else e for e in outs)  # B is its own largest
            if (ins, outs) not in claimed and _holds(op, results, outs):
                if same == outs or not _holds(op, results, same):
                    found.append(Signature(ins, outs))
    return found


def _holds(op: Expected, results: list[Tensors], outs: tuple[Sbp, ...]) -> bool:
    try:
        for i, (entry, want) in enumerate(zip(outs, op.expected, strict=True)):
            for rank, found in enumerate(results):
                spec = TensorSpec.of(op.placement, (entry,), want.shape, want.dtype)
                if tuple(found[i].shape) != tuple(spec.local_shape((rank,))):
                    return False
            got = join([found[i] for found in results], (entry,), op.shape)
            assert_close(got, want)
    except (AssertionError, RuntimeError):
        return False
    return True


def _entries(x: torch.Tensor) -> Iterator[Sbp]:
    yield B
    yield from (kind for kind in (P, *EXTREMES) if fits_dtype(kind, x.dtype))
    yield from (S(d) for d in range(x.ndim))
