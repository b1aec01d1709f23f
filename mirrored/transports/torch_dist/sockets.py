"""Sockets for messages to the processes of other ranks.

There is one for each direction between two ranks, made when the first message is sent or received.

```
thread that listens (faults/listener.py)    <-- secret, {"asks": "join", "rank": 1} --  rank 1
rank 0                                      <============== messages of rank 1 =======
```

The other rank's thread accepts the connection, whatever its program does meanwhile. So a rank may
send to one that has yet to reach the matching call.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

from torch import Tensor

from .. import _C  # pyright: ignore[reportAttributeAccessIssue]
from ..faults.watch import Watch
from .children import keep_alive


class Sockets:
    """Sockets by which this rank exchanges messages with the other ranks of one process group.

    ``alarm`` is the native flag that ends waits when any rank gives up. ``timeout_s`` is how long a
    wait lasts at most.
    """

    def __init__(self, size: int, timeout_s: float, alarm: Any) -> None:
        self._native = _C.Sockets(size, timeout_s, alarm)
        self._timeout_s = timeout_s
        self._connected_to: set[int] = set()  # ranks that this one has connected to
        self._connected_from: set[int] = set()  # ranks that have connected to this one
        self.sent = 0  # bytes
        self.wait = self._native.wait
        atexit.register(self.close)

    def join(self, watch: Watch) -> None:
        """Set the ``Watch`` by which this object connects to other ranks; called once."""
        # Weak: the watch refers to `receive_through`, and so to this object.
        self._watch = weakref.ref(watch)

    def send(self, to: int, tag: int, x: Tensor) -> Any:
        """Start to send ``x``, on the CPU, to rank ``to``; return a work object for ``wait``.

        The receiver matches it by ``tag``. ``x`` is kept alive until it has been sent.
        """
        if to not in self._connected_to:
            self._connect(to)
        self.sent += x.nbytes
        return self._native.send(to, tag, x)

    def receive(self, source: int, tag: int, out: Tensor) -> Any:
        """Start to fill ``out``, contiguous CPU memory; return a work object for ``wait``.

        ``source`` sends the message with the same ``tag``. ``out`` is kept alive until it is
        filled.
        """
        if source not in self._connected_from and source not in self._connected_to:
            try:
                self._connect(source)  # a connection by which the end of its process is noticed
            except RuntimeError:  # it has ended, perhaps after it had sent this message
                if source not in self._connected_from:
                    raise
        return self._native.receive(source, tag, out)

    def receive_through(self, rank: int, file: int) -> None:
        """Receive messages of ``rank`` from the socket with file descriptor ``file``."""
        self._native.arrive_by(rank, file)
        self._connected_from.add(rank)

    def close(self) -> None:
        """Send what is left, for a few seconds at most, and close all sockets."""
        atexit.unregister(self.close)
        self._native.close()

    def forget(self) -> None:
        """Keep the native object forever, in a forked child.

        Its destructor would wait for threads that the child does not have.
        """
        atexit.unregister(self.close)
        keep_alive(self._native)

    def _connect(self, rank: int) -> None:
        """Connect to ``rank``, to send messages to it."""
        watch = self._watch()
        assert watch is not None
        self._native.leave_by(rank, watch.join(rank, self._timeout_s))
        self._connected_to.add(rank)
