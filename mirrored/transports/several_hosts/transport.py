"""Transport between processes on several hosts.

```
inside a host      through shared memory
between hosts      messages, each between a rank here and its partner there, so that the
                   ranks of a host share the work

all-gather         each piece goes once to each other host, and is passed on there     moves.py
all-to-all         each piece is for one rank: as it is                                moves.py
reduce-scatter     sums of the first host's ranks go on to the next; addends of later  sums.py
                   hosts for an earlier one go unsummed, or as sums, there and back
all-reduce         sums go on from host to host, and the total back                    sums.py
broadcast          once to each other host, and is passed on there
```

Sums are made in the order of ranks, so they have the same bits as on one host. ``routes.py``
describes what that costs. Ranks find out which of them are on one host when they first communicate:
those with an equal host name (``segments.host``). A group whose ranks are all on one host, or each
on its own, is left to ``SharedMemory`` or ``TorchDist``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm import Handle, PendingResult, Ranks, Transport, Waitable, check_op
from ..failures import methods_count_out_of_memory
from ..torch_dist import TorchDist, messages
from ..torch_dist.described import current_call
from .hosts import Hosts
from .moves import HostsGather, start_all_to_all
from .sums import HostsReduceScatter, OverlappingAllReduces


@methods_count_out_of_memory
class SeveralHosts(TorchDist):
    """Transport for groups of ranks on several hosts, of which some share a host and its memory.

    Other groups are left to the base class.
    """

    def __init__(self) -> None:
        super().__init__()
        self._hosts: dict[Ranks, Hosts] = {}
        self._inside_transport: Transport = self
        self._all_reduces = OverlappingAllReduces()

    def record_hosts(self, ranks: Ranks, names: Sequence[Hashable], inside: Transport) -> None:
        self._inside_transport = inside
        if 1 < len(set(names)) < len(names):
            self._hosts[ranks] = Hosts.from_names(ranks, names, self.rank)

    def forget_hosts(self) -> None:
        self._hosts = {}

    def _hosts_sharing_memory(self, what: str, x: Tensor, ranks: Ranks) -> Hosts | None:
        """Return the hosts of ``ranks``; None if none of them share memory for tensors like ``x``.

        If None, the base class sends messages between all ranks. Otherwise the ranks of each host
        have compared their calls, by the name ``what`` and ``x``, and all raise if they differ.
        """
        hosts = self._hosts.get(ranks) if x.is_cpu else None
        if hosts is not None and len(hosts.own_positions) > 1:
            self._compare_calls(what, x, hosts)
        return hosts

    def _compare_calls(self, what: str, x: Tensor, hosts: Hosts) -> None:
        """Raise RuntimeError on all ranks if the ranks of this host do not make the same call.

        ``what`` and ``x`` describe this rank's call. Between hosts the tags of messages compare
        calls, but the headers in shared memory compare only how many bytes are sent.
        """
        call = f"{what} of {x.dtype} over ranks {hosts.ranks}, for {current_call()}"
        calls = self._inside_transport.gather_notes(call.encode(), hosts.peers)
        differing = next((k for k, note in enumerate(calls) if note != calls[0]), None)
        if differing is not None:
            (one, two), first_call = (hosts.peers[0], hosts.peers[differing]), calls[0].decode()
            why = f"rank {one} calls {first_call}, and rank {two} {calls[differing].decode()}"
            raise RuntimeError(self.watch.give_up(why))

    # ---- what TorchDist is made of --------------------------------------------------------------

    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        name = f"all_reduce({op})"
        hosts = self._hosts_sharing_memory(name, x, ranks)
        if hosts is None:
            return super()._reduce(x, ranks, op)
        return self._all_reduces.start(name, x.contiguous(), hosts, self._inside_transport, op)

    def _start_all_gather(
        self, name: str, x: Tensor, out: Sequence[Tensor], ranks: Ranks
    ) -> Waitable:
        hosts = self._hosts_sharing_memory(name, x, ranks)
        if hosts is None:
            return super()._start_all_gather(name, x, out, ranks)
        return HostsGather(name, x, out, hosts, self._inside_transport)

    def _start_all_to_all(
        self, name: str, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks
    ) -> Waitable:
        hosts = self._hosts_sharing_memory(name, out[0], ranks)
        if hosts is None:
            return super()._start_all_to_all(name, pieces, out, ranks)
        return start_all_to_all(name, pieces, out, hosts, self._inside_transport)

    def _start_reduce_scatter(
        self, parts: Sequence[Tensor], ranks: Ranks, op: str, at_once: bool
    ) -> Handle:
        check_op(op, parts[0].dtype)
        hosts = self._hosts_sharing_memory(f"reduce_scatter({op})", parts[0], ranks)
        if hosts is None:
            return super()._start_reduce_scatter(parts, ranks, op, at_once)
        flat = [part.reshape(-1) for part in parts]
        name, like = f"reduce_scatter({op})", parts[hosts.position]
        reducing = HostsReduceScatter(
            name, flat, hosts, self._inside_transport, op=op, at_once=at_once
        )
        return PendingResult(reducing, lambda: reducing.wait().view(like.shape))

    def reduce_scatter(
        self, x: Tensor, dim: int, sizes: Sequence[int], ranks: Ranks, op: str = "sum"
    ) -> Tensor:
        if ranks not in self._hosts or not x.is_cpu:
            return super().reduce_scatter(x, dim, sizes, ranks, op)
        return self.reduce_scatter_several([x], [dim], [sizes], ranks, op)[0]

    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        hosts = self._hosts_sharing_memory(f"broadcast from rank {source}", x, ranks)
        if hosts is None:
            return super()._broadcast(x, source, ranks)
        heads = hosts.heads(ranks.index(source))
        # Messages go to one rank of each host, which passes the tensor on inside it.
        if self.rank in heads:
            messages.broadcast(x, source, heads)
        head = heads[hosts.host]
        received = self._inside_transport.broadcast(x, x.shape, x.dtype, "cpu", head, hosts.peers)
        if self.rank != head:
            x.copy_(received)

    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        hosts = self._hosts_sharing_memory("exchange", empty, ranks)
        if hosts is None:
            return super()._exchange(sends, out, ranks, device)
        peers = hosts.peers
        local_receives = [(source, x) for source, x in out if source in peers]
        remote_messages = messages.StartedMessages(
            "exchange",
            next((x for _, x in (*sends, *out)), empty),
            [(to, x) for to, x in sends if to not in peers],
            [(source, x) for source, x in out if source not in peers],
            ranks,
        )
        local_sends = [(to, x) for to, x in sends if to in peers]
        expected = [(source, x.shape, x.dtype) for source, x in local_receives]
        for (_, x), received in zip(
            local_receives,
            self._inside_transport.exchange(local_sends, expected, peers),
            strict=True,
        ):
            x.copy_(received)
        remote_messages.wait()

    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        hosts = self._hosts_sharing_memory("gather_objects", torch.empty(0, device="cpu"), ranks)
        if hosts is None:
            return super()._gather_objects(obj, ranks)
        # Inside each host, then between the hosts' first ranks, then back inside each host.
        objects_of_host, heads = (
            self._inside_transport.gather_objects(obj, hosts.peers),
            hosts.heads(),
        )
        objects_by_host = (
            super()._gather_objects(objects_of_host, heads) if self.rank in heads else []
        )
        objects_by_host = self._inside_transport.gather_objects(objects_by_host, hosts.peers)[0]
        gathered = {
            k: item
            for positions, objects in zip(hosts.positions_by_host, objects_by_host)
            for k, item in zip(positions, objects)
        }
        return [gathered[k] for k in range(len(ranks))]
