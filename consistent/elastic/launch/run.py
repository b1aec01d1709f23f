"""Command line of the elastic launcher: ``python -m consistent run``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from . import mail
from .agent import Agent
from .leader import Leader
from .membership import Membership


def main(words: list[str]) -> int:
    """Run ``python -m consistent run`` with the arguments ``words``, and return the exit status."""
    args = _parser().parse_args(words)
    hosts, most_hosts = _host_range(args.nnodes)
    least = hosts * args.nproc_per_node if ":" in args.nnodes else 1
    membership = Membership(
        least=args.least or least,
        most=most_hosts * args.nproc_per_node,
        patience_s=args.patience,
        restarts=args.max_restarts,
        hosts=hosts,
    )
    host, _, port = (args.endpoint or "127.0.0.1:0").rpartition(":")
    leader = Leader(host, int(port), membership) if args.node_rank == 0 else None
    store_port = leader.port if leader is not None else int(port)
    if leader is None:
        _wait_for_store(host, store_port)
    script = [args.script] if args.no_python else [sys.executable, "-u", args.script]
    if args.module:
        script = [sys.executable, "-u", "-m", args.script]
    agent = Agent(args.node_rank, host, store_port, [*script, *args.arguments], _environment(args))
    try:
        code = agent.run(args.nproc_per_node)
        if agent.is_cut_off:  # a normal exit would tear down threads that are inside store calls
            sys.stderr.flush()
            os._exit(code)
        return code
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _environment(args: Any) -> dict[str, str]:
    return {"LOCAL_WORLD_SIZE": str(args.nproc_per_node)}


def _host_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last or first)


def _wait_for_store(host: str, port: int) -> None:
    """Wait until the first launcher's store listens at ``host`` and ``port``."""
    mail.client(host, port, timedelta(seconds=300))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m consistent run",
        description="Start ranks of a program that gives consistent.elastic.run its training. A "
        "rank that dies does not end the others.",
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks here")
    parser.add_argument(
        "--nnodes", default="1", metavar="N or MIN:MAX",
        help="hosts that the program begins with; with MIN:MAX it ends with fewer than MIN",
    )  # fmt: skip
    parser.add_argument(
        "--node-rank", type=int, default=0, metavar="K",
        help="number of this host; 0 has the store, and is the side that goes on",
    )  # fmt: skip
    parser.add_argument(
        "--endpoint", metavar="HOST:PORT", help="of the store, the same on each host"
    )
    parser.add_argument("--least", type=int, metavar="N", help="ranks that go on")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N",
        help="how many processes are started in place of those that are lost",
    )  # fmt: skip
    parser.add_argument(
        "--patience", type=float, default=30.0, metavar="S",
        help="seconds in which a rank must come out of a step that others have given up",
    )  # fmt: skip
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module")
    parser.add_argument("--no-python", action="store_true", help="the script is a program")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    return parser
