"""Ranks of one machine that take themselves for ranks of several hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mirrored.transports.default import replace_current
from mirrored.transports.several_hosts import SeveralHosts
from mirrored.transports.shared_memory import SharedMemory
from mirrored.transports.shared_memory.segments import HOST
from tests.ranks import pool

_transports: dict[str, SharedMemory] = {}  # one a process and layout, for it holds segments


def as_if(rank: int, hosts: str, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(rank, *args)` on the host `hosts[rank]`."""
    if hosts not in _transports:
        _transports[hosts] = SharedMemory(SeveralHosts())
    with pytest.MonkeyPatch.context() as patch, replace_current(_transports[hosts]):
        patch.setenv(HOST, hosts[rank])
        return fn(rank, *args)


def on_hosts(hosts: str, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(rank, *args)` on as many ranks as `hosts` has letters, each of which is a host."""
    return pool(len(hosts)).run(as_if, hosts, fn, *args)
