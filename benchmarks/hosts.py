"""Two hosts on one machine: network namespaces, joined by a pair of virtual Ethernet devices, or by
a link as slow as a real one (`link.py`).

The ranks of a host share memory; those of different hosts reach each other by messages alone,
through the kernel's network. Where namespaces may not be made (they need root and iproute2), ranks
only take themselves for ranks of two hosts; what is printed says so.

    with hosts(options):            the script; its processes inherit where the hosts are
        enter(rank, ranks)          each rank, before torch.distributed is initialised
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.link import MTU, NAME, enter_namespace, speed

_NAMES = "BENCHMARK_HOSTS"  # of the namespaces, for the processes of the ranks
_LINK = "BENCHMARK_LINK"  # between them: what it costs is kept by the hosts' names


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _name(host: int) -> str:
    return f"benchmark-{os.getpid()}-{host}"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--hosts` and `--link`."""
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="2: ranks on two")
    parser.add_argument("--link", default="", help="between them, such as 1Gbit,100us")


def described(options: argparse.Namespace) -> str:
    """Where the ranks are."""
    return f"2 hosts joined by {options.link}" if options.link else f"{options.hosts} host(s)"


@contextmanager
def hosts(options: argparse.Namespace) -> Iterator[None]:
    """Ranks that are started in the `with` block are on one host, or on two."""
    if options.link:
        speed(options.link)
        options.hosts = 2
    if options.hosts == 1:
        yield
        return
    with _ends_by_signal(), _two_hosts(options.link) as names:
        os.environ.update({_NAMES: " ".join(names), _LINK: options.link})
        try:
            yield
        finally:
            del os.environ[_NAMES], os.environ[_LINK]


@contextmanager
def _ends_by_signal() -> Iterator[None]:
    """Inside, a SIGTERM of this process raises, so that nothing is left behind."""
    owner = os.getpid()

    def end(number: int, frame: Any) -> None:
        if os.getpid() != owner:  # a fork of it, which has nothing to delete
            os._exit(128 + number)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _two_hosts(link: str) -> Iterator[list[str]]:
    """The names of two network namespaces, which are deleted after it; [] if there can be none."""
    names = [_name(0), _name(1)]
    with contextlib.ExitStack() as stack:
        stack.callback(_delete, names)
        try:
            _delete(_left_behind())
            for name in names:
                _run("ip", "netns", "add", name)
            stack.enter_context(_slow(names, link) if link else _fast(names))
            for host, name in enumerate(names):
                inside = ("ip", "-n", name)
                _run(*inside, "addr", "add", f"10.211.77.{host + 1}/24", "dev", NAME)
                _run(*inside, "link", "set", NAME, "up")
                _run(*inside, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            if link:
                raise
            print(f"no namespaces ({error}): all ranks on one host, of which half share memory")
            names = []
        yield names


def _fast(names: list[str]) -> contextlib.AbstractContextManager[Any]:
    _run(
        *("ip", "link", "add", NAME, "netns", names[0], "type", "veth"),
        *("peer", "name", NAME, "netns", names[1]),
    )
    return contextlib.nullcontext()


@contextmanager
def _slow(names: list[str], link: str) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.link", *names, link]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            if not process.stdout.readline():
                raise OSError("no link: the process that passes packets on has ended")
            for name in names:
                _run("ip", "-n", name, "link", "set", NAME, "mtu", str(MTU), "txqueuelen", "10000")
            yield
        finally:
            process.stdin.close()  # it ends


def bytes_between() -> int:
    """The bytes that have gone from host to host, both ways; 0 where there are no namespaces."""
    total = 0
    for name in os.environ.get(_NAMES, "").split():
        found = json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", NAME))
        total += found[0]["stats64"]["tx"]["bytes"]
    return total


def _left_behind() -> list[str]:
    """Namespaces of scripts that were killed."""
    found = re.findall(r"^(benchmark-(\d+)-\d)\b", _run("ip", "netns", "list"), re.MULTILINE)
    return [name for name, pid in found if not os.path.exists(f"/proc/{pid}")]


def _delete(names: list[str]) -> None:
    for name in names:
        subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def enter(rank: int, ranks: int) -> None:
    """Put this process, which is ``rank`` of ``ranks``, on its host: the first half of the ranks on
    the first one. Before torch.distributed is initialised; the master is rank 0."""
    if _NAMES not in os.environ:
        return
    host, names = rank * 2 // ranks, os.environ[_NAMES].split()
    os.environ.update(
        CONSISTENT_HOST=f"{host} {os.environ[_LINK]}", LOCAL_WORLD_SIZE=str(ranks // 2)
    )
    if names:
        enter_namespace(f"/var/run/netns/{names[host]}")
        os.environ.update(MASTER_ADDR="10.211.77.1", GLOO_SOCKET_IFNAME=NAME)
