"""Programs in which one rank goes astray, and the line where each rank then is.

A comment `# here: 0 2` says that ranks 0 and 2 are in that line when one gives up, `# here: others`
that all are that are named nowhere else; `# here: 1 in full, S(0) -> B` names the op and its boxing
too. What ends, stops or is deaf is in `INSTEAD`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import consistent
import mirrored
from consistent import B, P
from tests.faults.setting import ASTRAY, Setting, T

Program = Callable[[Setting], object]
PROGRAMS: dict[str, Program] = {}
INSTEAD: dict[str, dict[int, str]] = {}  # program -> rank -> what is said of it in place of a line
Ranks = tuple[tuple[int, int], ...]  # (how many, on how many hosts)
RANKS: dict[str, Ranks] = {}


def program(ranks: Ranks = ((2, 1), (3, 1), (3, 2)), **instead: str) -> Callable[..., Program]:
    """`r1="has ended"`: what is said of rank 1. Two hosts have two ranks and one."""

    def enter(function: Program) -> Program:
        name = function.__name__
        PROGRAMS[name], RANKS[name] = function, ranks
        INSTEAD[name] = {int(rank[1:]): said for rank, said in instead.items()}
        return function

    return enter


# ---- a rank takes another branch ----------------------------------------------------------------


@program()
def another_branch(s: Setting) -> object:
    if s.rank == 1:
        return s.partial.to_global(sbp=B)  # here: 1 in to_global, P -> B
    return s.x.to_global(sbp=B)  # here: others in to_global, S(0) -> B


@program()
def another_op(s: Setting) -> object:
    if s.rank == 1:
        return torch.softmax(s.x, 0)  # here: 1 in softmax
    addend = consistent.ones(6, 4, placement=s.x.placement, sbp=P)
    return s.x + addend  # here: others in add, P -> S(0)


@program()
def a_branch_that_communicates_nothing(s: Setting) -> object:
    if s.rank == 1:
        time.sleep(ASTRAY)  # here: 1
    return s.x.full()  # here: others in full, S(0) -> B


@program()
def item_on_one_rank(s: Setting) -> object:
    loss = s.partial.sum()
    if s.rank == 0:
        print(loss.item())  # here: 0 in item, P -> B
    time.sleep(ASTRAY)  # here: others
    return s.step()


@program()
def backward_on_one_rank(s: Setting) -> object:
    loss = (s.x @ s.replicated).sum()
    if s.rank == 0:
        loss.backward()  # here: 0 in backward
    time.sleep(ASTRAY)  # here: others
    return s.step()


@program()
def one_more_step_on_one_rank(s: Setting) -> object:
    for _ in range(3 if s.rank == 1 else 2):
        s.x.full()  # here: 1 in full, S(0) -> B
    time.sleep(ASTRAY)  # here: others
    return s.step()


@program()
def an_early_return(s: Setting) -> object:
    def train() -> None:
        if s.rank == 1:
            return
        s.x.full()  # here: others in full, S(0) -> B

    train()
    if s.rank == 1:
        time.sleep(ASTRAY)  # here: 1
    return s.step()


@program()
def an_exception_that_is_caught(s: Setting) -> object:
    with contextlib.suppress(ValueError):
        if s.rank == 1:
            raise ValueError("this batch is empty")
        s.x.full()  # here: others in full, S(0) -> B
    time.sleep(ASTRAY)  # here: 1
    return s.step()


@program()
def a_busy_loop(s: Setting) -> object:
    end = time.monotonic() + 1.25 * T
    if s.rank == 1:
        time.sleep(0.85 * T)  # it is busy when the others give up, which takes T
    while s.rank == 1 and time.monotonic() < end:  # here: 1
        pass
    return s.x.full()  # here: others in full, S(0) -> B


@program()
def a_lock_that_nobody_frees(s: Setting) -> object:
    if s.rank == 1:
        threading.Event().wait(ASTRAY)  # here: 1
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="does not answer")
def a_call_that_holds_the_interpreter(s: Setting) -> object:
    if s.rank == 1:
        ctypes.PyDLL(None).usleep(int((ASTRAY + 2) * 1e6))
    return s.x.full()  # here: others in full, S(0) -> B


@program(ranks=((2, 1), (3, 1)))  # by messages, who gives up ends torch's waits too
def a_barrier_of_torch(s: Setting) -> object:
    if s.rank == 1:
        time.sleep(T / 2)
        with contextlib.suppress(RuntimeError):
            dist.barrier()  # here: 1
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="has left the process group")
def a_group_that_one_rank_destroys(s: Setting) -> object:
    if s.rank == 1:
        dist.destroy_process_group()
        time.sleep(ASTRAY)
        return "it left"
    return s.x.full()  # here: others in full, S(0) -> B


# ---- ranks call what does not fit ---------------------------------------------------------------


@program()
def another_shape(s: Setting) -> object:
    return mirrored.all_reduce(s.plain[: 3 if s.rank == 1 else 4], s.ranks)  # here: others


@program()
def another_shape_of_as_many_bytes(s: Setting) -> object:
    x = torch.ones((6, 4) if s.rank == 1 else (4, 6))
    return mirrored.all_gather(x, 1, [x.shape[1]] * s.n, s.ranks)  # here: others


@program()
def another_dtype(s: Setting) -> object:
    x = s.plain.int() if s.rank == 1 else s.plain
    return mirrored.all_reduce(x, s.ranks)  # here: others


@program()
def another_reduction(s: Setting) -> object:
    return mirrored.all_reduce(s.plain, s.ranks, "max" if s.rank == 1 else "sum")  # here: others


@program()
def another_shape_of_a_long_tensor(s: Setting) -> object:
    x = torch.ones(300_000 + (s.rank == 1))
    return mirrored.all_reduce(x, s.ranks)  # here: others


@program()
def another_source(s: Setting) -> object:
    x, source = s.plain, int(s.rank == 1)
    given = x, x.shape, x.dtype, "cpu", source, s.ranks
    return mirrored.broadcast(*given).sum() + s.x.full().sum()  # here: others


@program()
def another_order_of_the_ranks(s: Setting) -> object:
    ranks = s.ranks[::-1] if s.rank == 1 else s.ranks
    return mirrored.all_gather(s.plain, 0, [4] * s.n, ranks)  # here: others


@program(ranks=((3, 1), (3, 2)))
def a_circle_of_groups(s: Setting) -> object:
    for other in (s.rank + 1, s.rank - 1):
        pair = tuple(sorted((s.rank, other % s.n)))
        mirrored.all_reduce(s.plain, pair)  # here: others
    return s.step()


# ---- a rank ends, or is stopped -----------------------------------------------------------------


@program(r1="has ended")
def a_program_that_is_done(s: Setting) -> object:
    if s.rank == 1:
        sys.exit(0)
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="ValueError: this batch is empty, at ")
def an_exception(s: Setting) -> object:
    if s.rank == 1:
        raise ValueError("this batch is empty")  # here: 1
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="KeyboardInterrupt")
def an_interrupt_of_a_rank_at_work(s: Setting) -> object:
    if s.rank == 1:
        raise KeyboardInterrupt
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="killed or crashed")
def kill_9(s: Setting) -> object:
    if s.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return s.x.full()  # here: others in full, S(0) -> B


@program(r0="killed or crashed")
def kill_9_of_the_rank_with_the_store(s: Setting) -> object:
    if s.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="killed or crashed")
def an_exit_without_farewell(s: Setting) -> object:
    if s.rank == 1:
        os._exit(3)
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="killed or crashed")
def a_crash(s: Setting) -> object:
    if s.rank == 1:
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        os.abort()
    return s.x.full()  # here: others in full, S(0) -> B


@program(r1="stopped")
def sigstop(s: Setting) -> object:
    if s.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return s.x.full()  # here: others in full, S(0) -> B


@program()
def an_interrupt_of_a_rank_that_waits(s: Setting) -> object:
    if s.rank == 0:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    if s.rank == 1:
        time.sleep(ASTRAY)  # here: 1
    return s.x.full()  # here: others in full, S(0) -> B


# ---- nothing is wrong ---------------------------------------------------------------------------


@program()
def a_rank_that_is_late(s: Setting) -> object:
    if s.rank == 1:
        time.sleep(T / 3)
    return s.step()


@program()
def a_print_on_one_rank(s: Setting) -> object:
    if s.rank == 1:
        print(s.x, s.partial)
    return s.step()


FINE = {"a_rank_that_is_late", "a_print_on_one_rank"}
