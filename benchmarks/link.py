"""A link between two network namespaces with the bandwidth and latency of a real one: a process
that takes packets from a device in one and puts them, later, into that of the other.

    python benchmarks/link.py NAMESPACE NAMESPACE 1Gbit,100us     it ends when its input does

For kernels without netem. The process uses a part of a core, which ranks then lack: all ways of a
benchmark alike.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import selectors
import struct
import sys
import time
from collections import deque
from typing import NamedTuple

NAME = "host-link"
NEW_NETWORK = 0x40000000  # CLONE_NEWNET of <sched.h>
# Bytes of a packet: those of Ethernet would be ten times as many packets as Python can pass on.
MTU = 16_000
_SET_INTERFACE, _IS_TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000  # of <linux/if_tun.h>
_SET_TIMER_SLACK = 29  # of <sys/prctl.h>
_UNITS = {"Gbit": 1e9 / 8, "Mbit": 1e6 / 8, "ms": 1e-3, "us": 1e-6}


class Speed(NamedTuple):
    """Of each direction."""

    bytes_per_s: float
    latency_s: float


def speed(text: str) -> Speed:
    """``1Gbit,100us`` -> Speed."""
    found = re.fullmatch(r"([\d.]+)(Gbit|Mbit),([\d.]+)(ms|us)", text)
    if found is None:
        raise ValueError(f"{text!r} is not a link: write it as 1Gbit,100us")
    rate, unit, latency, of_time = found.groups()
    return Speed(float(rate) * _UNITS[unit], float(latency) * _UNITS[of_time])


def enter_namespace(path: str) -> None:
    """Put this process into a network namespace."""
    with open(path) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns: this process may not change its network")


class Direction:
    """Packets from one device on their way to another: each leaves when the line is free, and
    arrives later by the latency."""

    def __init__(self, source: int, to: int, speed: Speed) -> None:
        self.source, self._to, self._speed = source, to, speed
        self._free = 0.0
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        """A packet is there to be read."""
        packet = os.read(self.source, MTU + 64)
        self._free = max(self._free, time.perf_counter()) + len(packet) / self._speed.bytes_per_s
        self._waiting.append((self._free + self._speed.latency_s, packet))

    def deliver(self) -> float | None:
        """Put what has arrived; seconds until the next packet does, None if there is none."""
        while self._waiting:
            left = self._waiting[0][0] - time.perf_counter()
            if left > 0:
                return left
            _, packet = self._waiting.popleft()
            with contextlib.suppress(OSError):  # it is not up yet, and the packet is lost
                os.write(self._to, packet)
        return None


def device(namespace: str) -> int:
    """A new device in a namespace, as a file of packets."""
    enter_namespace(f"/var/run/netns/{namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, _SET_INTERFACE, struct.pack("16sH22x", NAME.encode(), _IS_TUN | _NO_HEADER))
    return file


def main() -> None:
    first, second = device(sys.argv[1]), device(sys.argv[2])
    each = [
        Direction(first, second, speed(sys.argv[3])),
        Direction(second, first, speed(sys.argv[3])),
    ]
    ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
    with contextlib.suppress(OSError):  # before all else, or packets would wait for a processor
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    with selectors.SelectSelector() as ready:  # it counts microseconds, and epoll milliseconds
        for direction in each:
            ready.register(direction.source, selectors.EVENT_READ, direction)
        ready.register(sys.stdin, selectors.EVENT_READ)
        while True:
            left = [seconds for x in each if (seconds := x.deliver()) is not None]
            for key, _ in ready.select(min(left, default=None)):
                if key.data is None:
                    return
                key.data.take()


if __name__ == "__main__":
    main()
