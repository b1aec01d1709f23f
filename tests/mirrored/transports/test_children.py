"""A child of a rank that communicates is refused at once, and its parent goes on undisturbed."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import consistent
from consistent import B, Placement, S
from mirrored import current, use
from mirrored.comm import Transport
from mirrored.old_names import OldNames
from mirrored.transports.counting import Counting
from mirrored.transports.in_process import run_ranks
from mirrored.transports.ordered import Ordered
from mirrored.transports.shared_memory import SharedMemory
from mirrored.transports.symmetric_memory import SymmetricMemory
from mirrored.transports.torch_dist import TorchDist
from tests.mirrored.transports.symmetric_memory.host_memory import HostMemory
from tests.ranks import on_ranks, pool

RANKS = (0, 1)
X = torch.ones(4, 2)

# Every public method of a transport that reaches other ranks, on X.
CALLS: dict[str, Callable[[Transport, tuple[int, ...]], Any]] = {
    "all_reduce": lambda t, ranks: t.all_reduce(X, ranks),
    "all_reduce_async": lambda t, ranks: t.all_reduce_async(X.clone(), ranks).wait(),
    "all_gather": lambda t, ranks: t.all_gather(X, [X.shape] * len(ranks), ranks),
    "all_to_all": lambda t, ranks: t.all_to_all([X] * len(ranks), [X.shape] * len(ranks), ranks),
    "broadcast": lambda t, ranks: t.broadcast(X, X.shape, X.dtype, "cpu", ranks[0], ranks),
    "exchange": lambda t, ranks: t.exchange(
        [(rank, X) for rank in ranks], [(rank, X.shape, X.dtype) for rank in ranks], ranks
    ),
    "gather_notes": lambda t, ranks: t.gather_notes(b"x", ranks),
    "all_reduce_with_notes": lambda t, ranks: t.all_reduce_with_notes(X, ranks, ranks),
    "gather_objects": lambda t, ranks: t.gather_objects("x", ranks),
    "all_gather_into_tensor": lambda t, ranks: t.all_gather_into_tensor(
        X, 0, [4] * len(ranks), ranks
    ),
    "all_gather_several": lambda t, ranks: t.all_gather_several(
        [X, X], [0, 0], [[4] * len(ranks)] * 2, ranks
    ),
    "reduce_scatter_several": lambda t, ranks: t.reduce_scatter_several(
        [X, X], [0, 0], [_cut(4, ranks)] * 2, ranks
    ),
    "start_all_gather_several": lambda t, ranks: t.start_all_gather_several(
        [X, X], [0, 0], [[4] * len(ranks)] * 2, ranks
    ).wait(),
    "start_reduce_scatter_several": lambda t, ranks: t.start_reduce_scatter_several(
        [X, X], [0, 0], [_cut(4, ranks)] * 2, ranks
    ).wait(),
    "start_all_to_all": lambda t, ranks: t.start_all_to_all(
        [X for _ in ranks], [X.shape for _ in ranks], ranks
    ).wait(),
    "reduce_scatter": lambda t, ranks: t.reduce_scatter(X, 0, _cut(4, ranks), ranks),
    "all_to_all_single": lambda t, ranks: t.all_to_all_single(
        X, 1, _cut(2, ranks), 0, [4] * len(ranks), ranks
    ),
    "peers": lambda t, ranks: _entered(t.peers(X, ranks)),
    "as_one": lambda t, ranks: t.as_one(lambda xs: [t.all_reduce(xs[0], ranks)], [X], ranks),
    "addends": lambda t, ranks: _entered(t.addends(X, 0, _cut(4, ranks), ranks)),
    "shares": lambda t, ranks: t.shares(ranks, "cpu"),
    "overlaps": lambda t, ranks: t.overlaps(ranks, "cpu"),
}
# The last one tells others, without waiting.
ASKS_NOBODY = {"link", "hosts_of", "bytes_by_messages", "device", "rank_in", "abandon"}
ONE_TO_ONE = {"send", "receive"}  # between two ranks, and not of a group


def _cut(size: int, ranks: tuple[int, ...]) -> list[int]:
    return [size // len(ranks)] * len(ranks)


def _entered(context: Any) -> Any:
    with context as given:
        return [x.clone() for x in given if isinstance(x, torch.Tensor)]


TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "torch.distributed": TorchDist,
    "shared memory": lambda: SharedMemory(TorchDist()),
    "symmetric memory": lambda: SymmetricMemory(
        SharedMemory(TorchDist()), "cpu", 1 << 16, HostMemory
    ),
    "counting": lambda: Counting(SharedMemory(TorchDist())),
    "in order": lambda: Ordered(SharedMemory(TorchDist())),
}


def test_every_public_method_is_tried() -> None:
    methods = inspect.getmembers(Transport, inspect.isfunction)
    assert set(CALLS) | ASKS_NOBODY | ONE_TO_ONE == {
        name for name, _ in methods if not name.startswith("_") and name not in vars(OldNames)
    }


def _one_to_one(transport: Transport) -> list[str]:
    """What sending and receiving raise."""
    said, other = [], 1 - transport.rank
    for call in (
        lambda: transport.send(X, other, "x"),
        lambda: transport.receive(X.shape, X.dtype, other, "x", "cpu"),
    ):
        try:
            call()
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


@on_ranks(2)
def test_a_child_neither_sends_nor_receives(rank: int) -> None:
    current().all_reduce(X, RANKS)
    for said in by_fork(_one_to_one, current()):
        assert "child" in said, said
    current().all_reduce(X, RANKS)


# What is started and is waited for later, by messages.
STARTED: dict[str, Callable[[Transport], Any]] = {
    "all_reduce_async": lambda t: t.all_reduce_async(X.clone(), RANKS),
    "a long one": lambda t: t.all_reduce_async(torch.ones(1 << 20), RANKS),
    "start_all_gather_several": lambda t: t.start_all_gather_several([X], [0], [[4, 4]], RANKS),
    "start_reduce_scatter_several": lambda t: t.start_reduce_scatter_several(
        [X], [0], [[2, 2]], RANKS
    ),
    "start_all_to_all": lambda t: t.start_all_to_all([X, X], [X.shape, X.shape], RANKS),
    "send": lambda t: t.send(X, 1 - t.rank, "x"),
    "receive": lambda t: t.receive(X.shape, X.dtype, 1 - t.rank, "x", "cpu"),
}


def _waited_for(handles: dict[str, Any]) -> dict[str, str]:
    """What waiting for each raises."""
    said = dict.fromkeys(handles, "")
    for name, handle in handles.items():
        try:
            handle.wait()
        except RuntimeError as error:
            said[name] = str(error)
    return said


@on_ranks(2)
def test_a_child_does_not_wait_for_what_its_parent_has_started(rank: int) -> None:
    transport = TorchDist()
    handles = {name: start(transport) for name, start in STARTED.items()}
    for name, said in by_fork(_waited_for, handles).items():
        assert f"is a child of rank {rank}" in said, (name, said)
    found = {name: handle.wait() for name, handle in handles.items()}
    for name in ("all_reduce_async", "a long one"):
        assert torch.equal(found[name], torch.full_like(found[name], 2.0))
    assert torch.equal(found["start_all_gather_several"][0], torch.ones(8, 2))
    assert torch.equal(found["receive"], X)


def _submitted(ordered: Ordered) -> str:
    """What a call in the thread of ``ordered`` raises."""
    error = ordered.submit(ordered.inner.all_reduce, X, RANKS).exception(timeout=20)
    return str(error)


@on_ranks(2)
def test_a_child_does_not_wait_for_a_thread_of_its_parent(rank: int) -> None:
    ordered = Ordered(TorchDist())
    under_way = ordered.submit(ordered.inner.all_reduce, X, RANKS)
    assert f"is a child of rank {rank}" in by_fork(_submitted, ordered)
    assert torch.equal(under_way.result(), X * 2)
    assert torch.equal(ordered.submit(ordered.inner.all_reduce, X, RANKS).result(), X * 2)


class Forks:
    """A hook for a gradient that forks where it is called: the child goes on with the backward."""

    def __init__(self) -> None:
        self.children: list[int] = []

    def __call__(self, _: Any) -> None:
        self.children.append(os.fork())


@on_ranks(2)
def test_a_child_that_is_forked_in_backward_is_refused_and_its_parent_goes_on(rank: int) -> None:
    placement = Placement("cpu", RANKS)
    x = consistent.distribute(torch.arange(8.0).view(4, 2), placement, S(0))
    for again in range(3):
        weight = consistent.distribute(X[:2], placement, B).requires_grad_()
        forks, said = Forks(), ""
        loss = (torch.tanh(x @ weight) ** 2).sum()
        y = x @ weight
        y.register_hook(forks)
        try:
            (loss + (y**2).sum()).backward()
        except Exception as error:
            said = str(error)
        if forks.children == [0]:
            os._exit(7 if f"is a child of rank {rank}" in said else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(forks.children[0], 0)[1]) == 7, (again, said)
        assert not said and weight.grad is not None
        plain = X[:2].clone().requires_grad_()
        whole = torch.arange(8.0).view(4, 2) @ plain
        (torch.tanh(whole) ** 2 + whole**2).sum().backward()
        torch.testing.assert_close(weight.grad.full(), plain.grad)


def outcomes(transport: Transport, ranks: tuple[int, ...]) -> dict[str, str]:
    """What each call raises, "" for nothing."""
    said = {}
    for name, call in CALLS.items():
        try:
            call(transport, ranks)
            said[name] = ""
        except RuntimeError as error:
            said[name] = str(error)
    return said


def local_use(rank: int) -> dict[str, Any]:
    """What needs no other rank: groups of one, and ranks that are threads."""
    simulated = run_ranks(lambda _: current().all_reduce(X, RANKS)[0, 0].item(), 2)
    return {
        "alone": outcomes(current(), (rank,)),
        "simulated": simulated,
        "me": (current().rank, current().size),
    }


def child(kind: str, made: Transport, rank: int) -> dict[str, Any]:
    """What a child finds: with the transport of its parent, and with one of its own."""
    own = TRANSPORTS[kind]()
    with use(made):
        found = local_use(rank)
    for transport in (made, own):
        transport.link("cpu")  # of a world that the child knows and does not reach
    return found | {
        "inherited": outcomes(made, RANKS),
        "swapped": outcomes(made, RANKS[::-1]),  # a group that the parent has not met in
        "own": outcomes(own, RANKS),
    }


def by_fork(body: Callable[..., Any], *args: Any) -> Any:
    """What `body(*args)` gives in a forked child, which then ends as a program does."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            with open(writer, "wb") as pipe:
                pickle.dump(body(*args), pipe)
        except BaseException as error:  # noqa: BLE001 - the parent shows it
            os.write(2, repr(error).encode())
            os._exit(1)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        result = pickle.load(pipe)
    assert os.waitpid(pid, 0)[1] == 0
    return result


def _answer(queue: Any, body: Callable[..., Any], *args: Any) -> None:
    queue.put(pickle.dumps(body(*args)))


def by_multiprocessing(body: Callable[..., Any], *args: Any) -> Any:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    multiprocessing.current_process()._config["daemon"] = False  # the pool's processes are daemons
    process = context.Process(target=_answer, args=(queue, body, *args))
    process.start()
    result = pickle.loads(queue.get())
    process.join()
    return result


class Asked(Dataset):
    """One item: what the body finds in the worker."""

    def __init__(self, body: Callable[..., Any], args: tuple) -> None:
        self.body, self.args = body, args

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return pickle.dumps(self.body(*self.args))


def by_data_loader(body: Callable[..., Any], *args: Any) -> Any:
    multiprocessing.current_process()._config["daemon"] = False
    loader = DataLoader(
        Asked(body, args), 1, num_workers=1, collate_fn=_first, multiprocessing_context="fork"
    )
    return pickle.loads(next(iter(loader)))


def _first(items: list) -> Any:
    return items[0]


WAYS = {"os.fork": by_fork, "multiprocessing": by_multiprocessing, "DataLoader": by_data_loader}


def parent(rank: int, kind: str, way: str) -> dict[str, Any]:
    made = TRANSPORTS[kind]()
    before = outcomes(made, RANKS)
    found = WAYS[way](child, kind, made, rank)
    after = outcomes(made, RANKS)
    dist.barrier()
    with use(made):
        total = current().all_reduce(X * rank, RANKS)[0, 0].item()
    return found | {"before": before, "after": after, "total": total, "rank": rank}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_a_child_is_refused_and_its_parent_goes_on(kind: str, way: str) -> None:
    quiet = dict.fromkeys(CALLS, "")
    for rank, found in enumerate(pool(2).run(parent, kind, way)):
        assert found["before"] == found["after"] == quiet and found["total"] == 1
        assert found["alone"] == quiet and found["simulated"] == [2, 2]
        assert found["me"] == (rank, 2)
        for whose in ("inherited", "swapped", "own"):
            for name, said in found[whose].items():
                assert f"is a child of rank {rank}, and is to communicate over" in said, (
                    name,
                    said,
                )
                assert "x.full() or x.to_local()" in said and "spawn" in said
