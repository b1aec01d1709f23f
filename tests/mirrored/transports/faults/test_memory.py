"""A rank that gets no memory in the middle of what ranks do together, and whose program goes on,
takes no number of another step: all raise in that call, or at the next communication."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import consistent
import mirrored
from consistent import B, P, S
from mirrored.transports.default import current
from mirrored.transports.failures import count_out_of_memory, is_out_of_memory
from tests.mirrored.another_group import another_group
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, pool

STEPS = 4  # the first one is small, and makes plans and programs
LACKING = 1  # the step in which rank 1 gets no memory
_MB = 1 << 20
_BYTES = 8 * _MB  # of a tensor
_OTHERS = 2 * _MB  # what is left for the rest of a step
# How many tensors there is memory for.
ROOMS = (0, 1, 2) if ALL else (0, 1)

TOGETHER = "got no memory for"

# Seconds that a session may take, in which no rank waits until the time is up.
WAITED, TIMEOUT = 12.0, 20.0

PLACES: dict[str, Callable[[torch.Tensor], Any]] = {}


def place(step: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    PLACES[step.__name__] = step
    return step


def _split(x: torch.Tensor, sbp: Any = None) -> Any:
    return consistent.from_local(x, consistent.placement("cpu", [0, 1]), sbp or S(0))


@place
def gathered(x: torch.Tensor) -> Any:
    return _split(x).to_global(sbp=B)


@place
def reduced(x: torch.Tensor) -> Any:
    return _split(x, P).to_global(sbp=B)


@place
def scattered(x: torch.Tensor) -> Any:
    return _split(x, P).to_global(sbp=S(1))


@place
def turned(x: torch.Tensor) -> Any:
    return _split(x).to_global(sbp=S(1))


@place
def exchanged(x: torch.Tensor) -> Any:
    return _split(x).to_global(placement=consistent.placement("cpu", [1, 0]))


@place
def broadcast(x: torch.Tensor) -> Any:
    return mirrored.broadcast(x, tuple(x.shape), x.dtype, "cpu", 0, (0, 1))


@place
def in_several(x: torch.Tensor) -> Any:
    rows = [x.shape[0]] * 2
    return current().all_gather_several([x, x], [0, 0], [rows, rows], (0, 1))[1]


@place
def among_peers(x: torch.Tensor) -> Any:
    with current().peers(x, (0, 1)) as all_x:
        return all_x[0] + all_x[1]


@place
def of_objects(x: torch.Tensor) -> Any:
    told = current().gather_objects(x.numpy(), (0, 1))
    return torch.from_numpy(told[0]) + torch.from_numpy(told[1])


@place
def on_the_shard(x: torch.Tensor) -> Any:
    return torch.relu(_split(x) * 2)


@place
def backward(x: torch.Tensor) -> Any:
    y = _split(x).requires_grad_()
    (y.to_global(sbp=B) * 2).relu().sum().backward()
    return y.grad * y.detach()


@place
def distributed(x: torch.Tensor) -> Any:
    return consistent.distribute(x, consistent.placement("cpu", [0, 1]), S(0)).to_global(sbp=B)


@place
def made(x: torch.Tensor) -> Any:
    placement = consistent.placement("cpu", [0, 1])
    return consistent.full(x.shape, x[0, 0].item(), placement=placement, sbp=S(0)).to_global(sbp=B)


def _loss(x: Any) -> Any:
    return torch.relu(x * 2).to_global(sbp=B) + 1


_compiled = consistent.compile(_loss, backend="ops")


@place
def compiled(x: torch.Tensor) -> Any:
    return _compiled(_split(x))


@contextmanager
def little_memory(room: int) -> Iterator[None]:
    """This process gets memory for so many tensors more."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + room * _BYTES + _OTHERS, before[1]))
    held: list[torch.Tensor] = []  # what was freed before, and would be given again
    with suppress(RuntimeError):
        while True:
            held.append(torch.empty(_BYTES, dtype=torch.uint8))
    try:
        del held[:room]
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _session(rank: int, name: str, room: int | None) -> list[Any]:
    """What each step gives, up to one that another error ends than "lack", of this rank's own, or
    "together", of all ranks."""
    found: list[Any] = []
    for k in range(STEPS):
        rows = _BYTES // 4 // 64 if k else 4
        x = torch.full((rows, 64), float(k + 1))
        lacks = room is not None and rank == 1 and k == LACKING
        out = None
        try:
            with little_memory(room or 0) if lacks else nullcontext():
                out = PLACES[name](x)
            found.append(out[(0,) * out.dim()].item())  # flatten would move what is split
            found[-1] += out.sum().item()
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                found.append("lack")
            elif TOGETHER in str(error):
                found.append("together")
            else:
                return [*found, str(error)[:90]]
    return found


def _sessions(rank: int, names: list[str], rooms: tuple[int, ...]) -> dict[Any, list[Any]]:
    found: dict[Any, list[Any]] = {}
    for name in names:
        for room in (None, *rooms):
            another_group(rank, f"{name}/{room}", TIMEOUT)
            began = time.monotonic()
            found[name, room] = _session(rank, name, room)
            found[name, room].append(time.monotonic() - began)
    return found


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
def test_a_rank_that_lacked_memory_takes_no_number_of_another_step(where: str) -> None:
    names = list(PLACES)
    pool(2).close()
    try:
        ways = (over_gloo, _sessions) if where == "gloo" else (_sessions,)
        both = pool(2).run(*ways, names, ROOMS, timeout=600)
    finally:
        pool(2).close()
    lacking = 0
    for name in names:
        expected = both[0][name, None][:-1]
        assert both[1][name, None][:-1] == expected and len(set(expected)) == STEPS, name
        for room in ROOMS:
            lacking += _judge((name, room), [each[name, room] for each in both], expected)
    assert lacking >= len(names), lacking


def _judge(name: Any, found: list[list[Any]], expected: list[float]) -> bool:
    """Values are those of their steps, and a rank that lacked memory alone is noticed at once."""
    assert max(each[-1] for each in found) < WAITED, (name, found)
    said = [each[:-1] for each in found]
    for each in said:
        for k, value in enumerate(each):
            assert isinstance(value, str) or value == expected[k], (name, found)
    if "lack" in said[1]:
        # The source of a broadcast takes nothing, and may go on.
        assert isinstance(said[1][-1], str), (name, found)
    else:
        assert ["together" == value for value in said[0]] == ["together" == v for v in said[1]]
    return isinstance(said[1][LACKING], str)


def _in_groups(rank: int) -> tuple[str, float]:
    another_group(rank, "groups", TIMEOUT)
    for ranks in ((0, 1), (1, 0)):
        current().gather_objects(rank, ranks)
    if rank == 1:
        count_out_of_memory(MemoryError())
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        current().gather_objects(rank, (1, 0) if rank == 0 else (0, 1))
    return str(raised.value), time.monotonic() - began


def test_ranks_that_wait_for_each_other_in_two_groups_raise_at_once() -> None:
    pool(2).close()
    try:
        found = pool(2).run(_in_groups)
    finally:
        pool(2).close()
    for text, waited_s in found:
        assert "rank 1 has met an error in backward, a lack of memory" in text
        assert waited_s < WAITED
