"""Two hosts on one machine: network namespaces that a pair of virtual Ethernet devices joins.

Ranks of different hosts reach each other by messages alone, through the kernel's network. Where
namespaces may not be made (they need root and iproute2), ranks stay on one host and only shared
memory is off; what is printed says so.

    with hosts(options.hosts):      the script; its processes inherit where the hosts are
        enter(rank, ranks)          each rank, before torch.distributed is initialised
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>
_LINK = "host-link"
_NAMES = "BENCHMARK_HOSTS"  # of the namespaces, for the processes of the ranks


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _name(host: int) -> str:
    return f"benchmark-{os.getpid()}-{host}"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--hosts`."""
    parser.add_argument("--hosts", type=int, choices=(1, 2), default=1, help="2: ranks on two")


@contextmanager
def hosts(count: int) -> Iterator[None]:
    """Ranks that are started in the `with` block are on one host, or on two."""
    if count == 1:
        yield
        return
    with _two_hosts() as names:
        os.environ[_NAMES] = " ".join(names)
        try:
            yield
        finally:
            del os.environ[_NAMES]


@contextmanager
def _two_hosts() -> Iterator[list[str]]:
    """The names of two network namespaces, which are deleted after it; [] if there can be none."""
    names = [_name(0), _name(1)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            *("ip", "link", "add", _LINK, "netns", names[0], "type", "veth"),
            *("peer", "name", _LINK, "netns", names[1]),
        )
        for host, name in enumerate(names):
            inside = ("ip", "-n", name)
            _run(*inside, "addr", "add", f"10.211.77.{host + 1}/24", "dev", _LINK)
            _run(*inside, "link", "set", _LINK, "up")
            _run(*inside, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no namespaces ({error}): all ranks on one host, shared memory off")
        _delete(names)
        yield []
        return
    try:
        yield names
    finally:
        _delete(names)


def _delete(names: list[str]) -> None:
    for name in names:
        subprocess.run(("ip", "netns", "delete", name), capture_output=True, check=False)


def enter(rank: int, ranks: int) -> None:
    """Put this process, which is ``rank`` of ``ranks``, on its host: the first half of the ranks on
    the first one. Before torch.distributed is initialised; the master is rank 0."""
    if _NAMES not in os.environ:
        return
    os.environ["CONSISTENT_SHARED_MEMORY"] = "0"
    names = os.environ[_NAMES].split()
    if not names:
        return
    with open(f"/var/run/netns/{names[rank * 2 // ranks]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns: this process may not change its network")
    os.environ.update(MASTER_ADDR="10.211.77.1", GLOO_SOCKET_IFNAME=_LINK)
