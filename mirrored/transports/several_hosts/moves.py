"""Gathers and exchanges between ranks on several hosts.

```
          host 0        host 1                     host 0        host 1
rank    0        1    2        3                 0        1    2        3
sent    0 ---------> 2                           2 <--------- 0             each piece once
                 1 ----------> 3                          3 <--------- 1
inside  0, 1     0, 1                            2, 3     2, 3              through memory
```

In an all-gather each piece goes once to each other host, where one rank receives it and passes it
through shared memory to the ranks of that host. In an all-to-all each piece is for one rank:
between hosts it is a message, inside a host it goes through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...comm import Transport
from ..torch_dist.messages import Posted, flat
from .hosts import Hosts


class HostsGather:
    """Started all-gather of ``x`` into ``out``, which contains this rank's own piece already.

    The constructor sends the messages to other hosts, and gathers the pieces of this host while
    they travel. ``wait()`` passes received pieces on to the other ranks of this host.

    Args:
        name: the name of the call, for messages and errors.
        x: this rank's piece.
        out: a tensor for the piece of each rank.
        hosts: the hosts of the ranks.
        inside: the transport among the ranks of this host.
    """

    def __init__(
        self, name: str, x: Tensor, out: Sequence[Tensor], hosts: Hosts, inside: Transport
    ) -> None:
        self._out = [flat(piece) for piece in out]
        self._hosts, self._inside = hosts, inside
        me, ranks, x = hosts.me, hosts.ranks, x.contiguous()
        others = [host for host in range(len(hosts.members)) if host != hosts.host]
        sends = [(ranks[hosts.partner(me, host)], x) for host in others if x.numel()]
        # The pieces from elsewhere that each rank of this host receives.
        away = [k for host in others for k in hosts.members[host] if out[k].numel()]
        self._shares = {
            member: [k for k in away if hosts.partner(k, hosts.host) == member]
            for member in hosts.mine
        }
        receives = [(ranks[k], out[k]) for k in self._shares[me]]
        self._posted = Posted(name, x, sends, receives, ranks)
        self._pass_on({member: member for member in hosts.mine})

    def wait(self) -> None:
        self._posted.wait()
        # A rank may have received several pieces: one all-gather inside the host for each.
        for turn in range(max(map(len, self._shares.values()))):
            self._pass_on({m: own[turn] for m, own in self._shares.items() if turn < len(own)})

    def _pass_on(self, pieces: dict[int, int]) -> None:
        """All-gather one piece from each rank of this host into ``out``, through shared memory.

        ``pieces`` maps the position of a rank of this host to the position in ``out`` of the piece
        that this rank has; ranks that are not in it have none.
        """
        hosts = self._hosts
        nothing = self._out[0][:0]
        out = [self._out[pieces[m]] if m in pieces else nothing for m in hosts.mine]
        if len(hosts.mine) > 1 and any(x.numel() for x in out):
            own = out[hosts.mine.index(hosts.me)]
            self._inside.all_gather(own, [x.shape for x in out], hosts.peers, out)


def start_all_to_all(
    name: str,
    pieces: Sequence[Tensor],
    out: Sequence[Tensor],
    hosts: Hosts,
    inside: Transport,
) -> Posted:
    """Start an all-to-all that sends ``pieces[k]`` to rank k and receives into ``out[k]``.

    Pieces from ranks of this host have arrived when this returns. ``wait()`` of the result waits
    for those from other hosts.

    Args:
        name: the name of the call, for messages and errors.
        pieces: what this rank sends to each rank.
        out: a tensor for what each rank sends here.
        hosts: the hosts of the ranks.
        inside: the transport among the ranks of this host.
    """
    away = [k for k in range(len(hosts.ranks)) if hosts.of[k] != hosts.host]
    sends = [(hosts.ranks[k], pieces[k]) for k in away if pieces[k].numel()]
    receives = [(hosts.ranks[k], out[k]) for k in away if out[k].numel()]
    posted = Posted(name, pieces[hosts.me], sends, receives, hosts.ranks)
    coming = [flat(out[k]) for k in hosts.mine]
    inside.all_to_all(
        [flat(pieces[k]) for k in hosts.mine], [x.shape for x in coming], hosts.peers, coming
    )
    return posted
