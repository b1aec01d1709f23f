"""Calls that shared memory tells apart by their headers, messages tell apart by their tags."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from mirrored import current
from mirrored.comm import Transport
from mirrored.transports.torch_dist import TorchDist, messages, transport
from tests.ranks import pool

RANKS = (0, 1)
SHAPES = (4, 6), (6, 4), (2, 3, 4)
Call = Callable[[Transport], Any]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def calls() -> dict[str, Call]:
    """Calls of 96 bytes a rank, and some of 400 KB."""
    found: dict[str, Call] = {}
    for shape in SHAPES:
        x = ones(*shape)
        large = ones(*shape[:-1], shape[-1] * 4200)
        for op in ("sum", "max"):
            found[f"all_reduce {op} {shape}"] = lambda t, x=x, op=op: t.all_reduce(x, RANKS, op)
        found[f"large {shape}"] = lambda t, x=large: t.all_reduce(x, RANKS)
        found[f"begun {shape}"] = lambda t, x=large: t.all_reduce_async(x.clone(), RANKS).wait()
        found[f"peers {shape}"] = lambda t, x=x: _peers(t, x)
        for source in RANKS:
            found[f"broadcast {shape} from {source}"] = lambda t, x=x, source=source: t.broadcast(
                x, x.shape, x.dtype, "cpu", source, RANKS
            )
        for dim in range(len(shape)):
            whole = [shape[dim]] * 2
            found[f"join {shape} {dim}"] = lambda t, x=x, d=dim, s=whole: t.all_gather_into_tensor(
                x, d, s, RANKS
            )
            found[f"joins {shape} {dim}"] = lambda t, x=x, d=dim, s=whole: t.all_gather_several(
                [x, x], [d, d], [s, s], RANKS
            )
            if shape[dim] % 2:
                continue
            half = [shape[dim] // 2] * 2
            for op in ("sum", "max"):
                given = x, dim, half, RANKS, op
                found[f"cut {op} {shape} {dim}"] = lambda t, a=given: t.reduce_scatter(*a)
                several = [x, x], [dim, dim], [half, half], RANKS, op
                found[f"cuts {op} {shape} {dim}"] = lambda t, a=several: t.reduce_scatter_several(
                    *a
                )
            for other in range(len(shape)):
                turned = x, dim, half, other, [shape[other]] * 2, RANKS
                if other != dim:
                    found[f"turn {shape} {dim} {other}"] = lambda t, a=turned: t.all_to_all_single(
                        *a
                    )
    found["all_gather"] = lambda t: t.all_gather(ones(4, 6), [(4, 6)] * 2, RANKS)
    found["all_to_all"] = lambda t: t.all_to_all([ones(4, 6)] * 2, [(4, 6)] * 2, RANKS)
    found["int"] = lambda t: t.all_reduce(ones(4, 6, dtype=torch.int32), RANKS)
    found["exchange"] = lambda t: t.exchange(
        [(1 - t.rank, ones(4, 6))], [(1 - t.rank, (4, 6), torch.float32)], RANKS
    )
    found["objects"] = lambda t: t.gather_objects("x" * 80, RANKS)
    return found


def _peers(t: Transport, x: torch.Tensor) -> None:
    with t.peers(x, RANKS):
        pass


NAMES = list(calls())


def told_apart(rank: int) -> set[tuple[str, str]]:
    """Pairs (call of rank 0, call of rank 1) for which shared memory raises."""
    found, made = set(), calls()
    for pair in product(NAMES, NAMES):
        try:
            made[pair[rank]](current())
        except (RuntimeError, ValueError):
            found.add(pair)
    return found


class Recorder:
    """Stands for the world and its sockets of one of two ranks: nothing is sent but noted."""

    size, uses_nccl, watch, is_child = 2, False, None, False

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: set[int] = set()
        self.received: set[int] = set()

    def check_reachable(self, ranks: object) -> None: ...

    def run_watched(self, name: str, x: object, ranks: object, messages: Callable[[], Any]) -> Any:
        return messages()

    def sockets_to(self, ranks: object) -> Recorder:
        return self

    def send(self, to: int, tag: int, x: object) -> None:
        self.sent.add(tag)

    def receive(self, source: int, tag: int, out: torch.Tensor) -> None:
        out.zero_()
        self.received.add(tag)

    def wait(self, messages: object) -> None: ...


def recorded(call: Call, rank: int, patch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder(rank)
    for module in (messages, transport):
        patch.setattr(module, "world", partial(lambda found: found, made))
    with contextlib.suppress(EOFError):  # of objects, which are empty here
        call(TorchDist())
    return made


def test_tags_tell_apart_what_headers_tell_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pool(2).run(told_apart)
    assert pairs[0] == pairs[1] and len(pairs[0]) > 0.95 * len(NAMES) ** 2
    notes = {(name, r): recorded(calls()[name], r, monkeypatch) for name in NAMES for r in RANKS}
    for name in NAMES:  # calls that fit do meet; sizes of objects are not received here
        assert notes[name, 1].received <= notes[name, 0].sent
        assert notes[name, 0].received <= notes[name, 1].sent
    for a, b in pairs[0]:
        one, other = notes[a, 0], notes[b, 1]
        assert not one.sent & other.received and not other.sent & one.received, (a, b)
