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
from ..torch_dist.messages import StartedMessages, as_bytes
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
        self._out = [as_bytes(piece) for piece in out]
        self._hosts, self._inside_transport = hosts, inside
        me, ranks, x = hosts.position, hosts.ranks, x.contiguous()
        other_hosts = [host for host in range(len(hosts.positions_by_host)) if host != hosts.host]
        sends = [(ranks[hosts.partner(me, host)], x) for host in other_hosts if x.numel()]
        # The pieces from elsewhere that each rank of this host receives.
        remote_positions = [
            k for host in other_hosts for k in hosts.positions_by_host[host] if out[k].numel()
        ]
        self._received_by_member = {
            member: [k for k in remote_positions if hosts.partner(k, hosts.host) == member]
            for member in hosts.own_positions
        }
        receives = [(ranks[k], out[k]) for k in self._received_by_member[me]]
        self._started_messages = StartedMessages(name, x, sends, receives, ranks)
        self._gather_on_host({member: member for member in hosts.own_positions})

    def wait(self) -> None:
        self._started_messages.wait()
        # A rank may have received several pieces: one all-gather inside the host for each.
        for round_index in range(max(map(len, self._received_by_member.values()))):
            self._gather_on_host(
                {
                    m: received[round_index]
                    for m, received in self._received_by_member.items()
                    if round_index < len(received)
                }
            )

    def _gather_on_host(self, pieces: dict[int, int]) -> None:
        """All-gather one piece from each rank of this host into ``out``, through shared memory.

        ``pieces`` maps the position of a rank of this host to the position in ``out`` of the piece
        that this rank has; ranks that are not in it have none.
        """
        hosts = self._hosts
        empty = self._out[0][:0]
        out = [self._out[pieces[m]] if m in pieces else empty for m in hosts.own_positions]
        if len(hosts.own_positions) > 1 and any(x.numel() for x in out):
            own_piece = out[hosts.own_positions.index(hosts.position)]
            self._inside_transport.all_gather(own_piece, [x.shape for x in out], hosts.peers, out)


def start_all_to_all(
    name: str,
    pieces: Sequence[Tensor],
    out: Sequence[Tensor],
    hosts: Hosts,
    inside: Transport,
) -> StartedMessages:
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
    remote_positions = [k for k in range(len(hosts.ranks)) if hosts.host_of[k] != hosts.host]
    sends = [(hosts.ranks[k], pieces[k]) for k in remote_positions if pieces[k].numel()]
    receives = [(hosts.ranks[k], out[k]) for k in remote_positions if out[k].numel()]
    posted = StartedMessages(name, pieces[hosts.position], sends, receives, hosts.ranks)
    local_out = [as_bytes(out[k]) for k in hosts.own_positions]
    inside.all_to_all(
        [as_bytes(pieces[k]) for k in hosts.own_positions],
        [x.shape for x in local_out],
        hosts.peers,
        local_out,
    )
    return posted
