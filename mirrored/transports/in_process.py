"""Simulated ranks: threads of one process that pass each other copies of tensors.

Every ordered pair of ranks has a queue; a collective is a round of messages. Autograd's backward on
CPU runs in the thread that calls it, so differentiable code works too. Backward on CUDA does not
work here, because it runs in threads of the autograd engine that belong to no rank.

A mistake that would hang between processes raises here: if a rank fails, all others end with
``RankAborted``. Ranks that wait for each other in a circle, or for a rank that has returned, raise,
and so do ranks whose calls do not match.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm import CompletedHandle, Handle, Ranks, placeholder_like
from ..reduction import ordered_reduce
from .base.checked import CheckedTransport
from .default import use
from .faults.place import describe_place


class RankAborted(RuntimeError):
    """Error that ends a simulated rank because another one failed."""


class InProcessState:
    """State that simulated ranks share: message queues, ranks that wait, and the first failure.

    Simulated ranks are threads of one process; ``size`` is their number.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        # One condition for each rank: a message wakes only its receiver.
        self.arrived = [threading.Condition(self.lock) for _ in range(size)]
        self.queues: dict[tuple[int, int], deque[tuple[str, Any]]] = {
            (a, b): deque() for a in range(size) for b in range(size)
        }
        self.labelled: dict[tuple[int, int, str], deque[Any]] = {}
        self.waiting: dict[int, tuple[int, str, deque[Any]]] = {}
        self.threads: dict[int, int] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None

    def send(self, source: int, to: int, what: str, message: Any) -> None:
        with self.lock:
            self.queues[source, to].append((what, message))
            self.arrived[to].notify_all()

    def receive(self, source: int, to: int, what: str) -> Any:
        """Wait for and return the next message from rank ``source`` to rank ``to``.

        ``what`` names the receiver's call. Raises RuntimeError if the message was sent in a call of
        another name, because then the ranks make different calls.
        """
        with self.lock:
            sent_call, message = self._take_message(self.queues[source, to], source, to, what)
        if sent_call != what:
            raise RuntimeError(
                f"rank {to} calls {what} while rank {source} calls {sent_call}.\n"
                f"{self._rank_lines()}"
                "  Ranks of one group must make the same calls in the same order.\n"
                "  Look for a branch that only some of the ranks take."
            )
        return message

    def post(self, source: int, to: int, label: str, message: Any) -> None:
        with self.lock:
            self.labelled.setdefault((source, to, label), deque()).append(message)
            self.arrived[to].notify_all()

    def fetch(self, source: int, to: int, label: str) -> Any:
        """Wait for and return the next message that ``source`` posts to ``to`` under ``label``."""
        with self.lock:
            queue = self.labelled.setdefault((source, to, label), deque())
            message = self._take_message(queue, source, to, label)
            if not queue:
                # Empty queues of labels that are not used again would pile up.
                del self.labelled[source, to, label]
        return message

    def _take_message(self, queue: deque[Any], source: int, to: int, what: str) -> Any:
        """Wait for a message in ``queue``, take it out and return it; the caller holds the lock.

        ``source``, ``to`` and ``what`` (a call or a label) describe the wait for error messages.
        Raises RankAborted if another rank fails meanwhile.
        """
        self.waiting[to] = (source, what, queue)
        while not queue and self.failure is None:
            self._check_progress()
            self.arrived[to].wait()
        del self.waiting[to]
        if self.failure is not None:
            raise RankAborted(f"rank {to}: ended in {what}, for another rank failed")
        return queue.popleft()

    def _check_progress(self) -> None:
        """Raise RuntimeError if no rank can ever continue: all wait for messages or have returned.

        Each rank calls it before it waits, with the lock held.
        """
        # A rank in `waiting` whose queue is not empty was notified and will run on.
        stuck_ranks = {to for to, (_, _, queue) in self.waiting.items() if not queue}
        if len(stuck_ranks | self.finished) < self.size:
            return
        raise RuntimeError(
            "simulated ranks wait for messages that nobody will send.\n"
            f"{self._rank_lines()}"
            "  Let every rank of a group make the same calls in the same order."
        )

    def _rank_lines(self) -> str:
        """Return lines of an error message, one for each rank, that say where each rank is."""
        lines = []
        for rank, thread in sorted(self.threads.items()):
            status = "has returned" if rank in self.finished else describe_place(thread)
            if rank in self.waiting:
                source, what, _ = self.waiting[rank]
                status = f"waits for rank {source} in {what}: {status}"
            lines.append(f"    rank {rank}: {status}\n")
        return "".join(lines)

    def fail(self, error: BaseException) -> None:
        with self.lock:
            # The first failure is the cause; later ones are mostly `RankAborted`.
            self.failure = self.failure or error
            self._wake_all()

    def finish(self, rank: int) -> None:
        with self.lock:
            self.finished.add(rank)
            self._wake_all()

    def _wake_all(self) -> None:
        """Wake every waiting rank to check for a failure. Called with the lock held."""
        for condition in self.arrived:
            condition.notify_all()


class InProcess(CheckedTransport):
    """Transport of rank ``rank`` of a simulated ``world``, whose ranks are threads.

    ``run_ranks`` makes one for each thread.
    """

    def __init__(self, world: InProcessState, rank: int) -> None:
        self.world = world
        self._rank = rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self.world.size

    def _swap_messages(self, what: str, ranks: Ranks, messages: Sequence[Any]) -> list[Any]:
        """Send ``messages[k]`` to ``ranks[k]``, and return what each of ``ranks`` sent here.

        ``what`` is the name of the collective; a message of another one raises RuntimeError.
        """
        what = f"{what} over ranks {tuple(ranks)}"
        for to, message in zip(ranks, messages, strict=True):
            self.world.send(self._rank, to, what, message)
        return [self.world.receive(source, self._rank, what) for source in ranks]

    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        # All receivers may share one copy, since they only read it.
        what = f"all_reduce({op}) of {tuple(x.shape)}"
        pieces = self._swap_messages(what, ranks, [x.clone()] * len(ranks))
        return CompletedHandle(ordered_reduce(pieces, op))

    def _all_gather(self, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None:
        pieces = self._swap_messages("all_gather", ranks, [x.clone()] * len(ranks))
        _copy_pieces(out, pieces)

    def _all_to_all(self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks) -> None:
        _copy_pieces(
            out, self._swap_messages("all_to_all", ranks, [piece.clone() for piece in pieces])
        )

    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        own_message = x.clone() if source == self._rank else None
        pieces = self._swap_messages(f"broadcast from {source}", ranks, [own_message] * len(ranks))
        _copy_pieces([x], [pieces[ranks.index(source)]])

    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        # All sends first: the queues are unbounded, so sending never blocks.
        for to, x in sends:
            self.world.send(self._rank, to, "exchange", x.clone())
        for source, x in out:
            _copy_pieces([x], [self.world.receive(source, self._rank, "exchange")])

    def _send(self, x: Tensor, to: int, label: str) -> Handle:
        # A copy, since the caller may overwrite `x` once this has returned.
        self.world.post(self._rank, to, label, x.clone())
        return CompletedHandle(placeholder_like(x))

    def _receive(self, out: Tensor, source: int, label: str) -> Handle:
        return _ReceiveHandle(self, out, source, label)

    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        return self._swap_messages("gather_objects", ranks, [copy.deepcopy(obj) for _ in ranks])


class _ReceiveHandle:
    """Handle of a message from ``source`` under ``label``; ``wait()`` fills and returns ``out``."""

    def __init__(self, transport: InProcess, out: Tensor, source: int, label: str) -> None:
        self.transport, self.out, self.source, self.label = transport, out, source, label

    def wait(self) -> Tensor:
        rank = self.transport.rank
        _copy_pieces([self.out], [self.transport.world.fetch(self.source, rank, self.label)])
        return self.out


def _copy_pieces(out: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
    for x, piece in zip(out, pieces, strict=True):
        if x.shape != piece.shape or x.dtype != piece.dtype:
            raise RuntimeError(
                f"a rank expects {x.dtype} {tuple(x.shape)} and gets {piece.dtype} "
                f"{tuple(piece.shape)}.\n  Shapes and dtypes must agree between ranks.\n"
                "  Pass the shape that the sending rank's piece has."
            )
        x.copy_(piece)


def run_ranks(fn: Callable[[int], Any], size: int) -> list[Any]:
    """Run ``fn(rank)`` on ``size`` simulated ranks; return the results in order of rank.

    Re-raises the first error. The ranks share torch's global random state, so draw random numbers
    from generators of your own.
    """
    world = InProcessState(size)
    results: list[Any] = [None] * size

    def main(rank: int) -> None:
        world.threads[rank] = threading.get_ident()
        try:
            with use(InProcess(world, rank)):
                results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001 - carried over to the caller's thread
            world.fail(error)
        finally:
            world.finish(rank)

    threads = [threading.Thread(target=main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.failure is not None:
        raise world.failure
    return results
