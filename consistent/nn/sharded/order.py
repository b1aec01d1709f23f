"""Which parameters modules gather, and in which order, by which the next ones are predicted.

The next parameters are predicted to be those that came next the last time, in forward and in
backward. After a wrong prediction, nothing is prefetched at that point again. Whether a parameter
is prefetched thus depends only on the program, not on the speed of a rank, so all ranks prefetch
the same (``prefetch.py`` says how).
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...dispatch.plans.shards import is_global, plain
from ...movement import check_mode
from ...movement.coders import Coder
from ...spec import NdSbp, TensorSpec
from .prefetch import Sending, Wanted, no_prefetch, switches

Key = Any


# -- what a module gathers -------------------------------------------------------------------------


class ShardedParameter(NamedTuple):
    """Place of a sharded parameter in a module, with what is needed to gather it.

    Attributes:
        owner, key: the module that has the parameter, and its key there.
        use: the layout in which forward uses it.
        coder: the codecs for gathering it and reducing its gradient; None without codecs.
    """

    owner: nn.Module
    key: str
    use: NdSbp
    coder: Coder | None = None

    @property
    def value(self) -> Any:
        """Return the parameter that the module has at this moment; it may have been replaced."""
        return self.owner._parameters.get(self.key)

    def begun_coder(self) -> Coder | None:
        """Return the codecs, after allocating what they need if the parameter needs a gradient.

        That is a buffer for rounding errors, for example.
        """
        if self.coder is not None and is_global(self.value):
            self.coder.begin(self.value)
        return self.coder


class ToGather(NamedTuple):
    """A parameter that a module gathers in the call that begins.

    Attributes:
        param: the parameter.
        dst: the spec to which it is gathered.
        coder: its codecs, if any.
        places: all its places in modules, of which a tied parameter has several.
    """

    param: Any
    dst: TensorSpec
    coder: Coder | None
    places: list[ShardedParameter]


class GatherUnit:
    """Parameters that one module gathers at a time, in one message.

    Args:
        parameters: the places of the parameters.
        orders: the orders in which all units of the whole module are gathered, by which the next
            ones are prefetched; None without prefetching.
    """

    def __init__(
        self, parameters: tuple[ShardedParameter, ...], orders: GatherOrders | None
    ) -> None:
        self.parameters: tuple[ShardedParameter, ...] = parameters
        self.orders = orders
        # The positions of parameters that a backward took first. Their gathered values are kept
        # from forward until backward: backward gathers them at once, so freeing them would save no
        # memory.
        self.opens_backward: set[int] = set()

    def to_gather(self) -> list[ToGather]:
        """Return the parameters that are stored in another layout than forward needs, each once."""
        by_id: dict[int, ToGather] = {}
        for place in self.parameters:
            param = place.owner._parameters.get(place.key)
            if (entry := by_id.get(id(param))) is not None:
                entry.places.append(place)
            elif is_global(param) and param._spec.sbp != place.use:  # type: ignore[union-attr]
                dst = param._spec.with_sbp(place.use)  # type: ignore[union-attr]
                coder = None if place.coder is None else place.begun_coder()
                by_id[id(param)] = ToGather(param, dst, coder, [place])
        return list(by_id.values())

    def wanted(self) -> list[Wanted]:
        """Return (shard, its spec, spec in forward, codecs) of each parameter, for a prefetch."""
        return [(plain(x).detach(), x._spec, dst, c) for x, dst, c, _ in self.to_gather()]

    def __deepcopy__(self, memo: dict) -> GatherUnit:
        memo[id(self)] = new = type(self)((), self.orders)
        new.parameters = copy.deepcopy(self.parameters, memo)
        return new


def wanted_in_backward(key: tuple[GatherUnit, int]) -> list[Wanted]:
    """Return what is needed to prefetch one parameter in backward, as a list of one.

    It is read from the module and not from saved graphs, which may be alive on some ranks only. The
    list is empty if the unit gathers fewer parameters than before.

    Args:
        key: (the unit that gathers the parameter, its position among those to gather).
    """
    unit, position = key
    return unit.wanted()[position : position + 1]


# -- in which order --------------------------------------------------------------------------------


class _PrefetchGroup:
    """Parameters whose prefetch is started together; the constructor starts it.

    Args:
        sending: the way to prefetch.
        wanted: the parameters.
    """

    def __init__(self, sending: Sending, wanted: list[Wanted]) -> None:
        self._values: list[Any] | None = None
        self._wait = sending.start(wanted)

    def take(self, i: int) -> Tensor:
        """Wait for the prefetch, and return the values of parameter ``i``; only once for each."""
        if self._values is None:
            # Tensors that are made in inference mode have no version counter.
            is_inference = torch.is_inference_mode_enabled()
            with torch.inference_mode(False) if is_inference else nullcontext():
                self._values = list(self._wait())
        values, self._values[i] = self._values[i], None  # the caller gets the only reference
        return values


class _Prefetch(NamedTuple):
    """A prefetch under way, of parameters that are expected to be gathered next.

    Attributes:
        after: the key that was gathered before ``key`` the last time.
        key: the key of the prefetched parameters.
        parts: (shard, its version, the spec to gather it to) of each parameter.
        group: the parameters whose prefetch was started together with this one.
        first: the position of this prefetch's first parameter in ``group``.
    """

    after: Key
    key: Key
    parts: list[tuple[Tensor, int, TensorSpec]]  # shard, its version, the spec to gather it to
    group: _PrefetchGroup
    first: int


class GatherOrder:
    """Order in which a module's parameters are gathered, by which the next ones are prefetched.

    A *key* stands for parameters that are gathered together. When one is gathered,
    ``record_gather`` records it and returns its prefetch, and ``prefetch_next`` prefetches the keys
    that followed it the last time. There is one order for forward, one for backward, and one for a
    forward that backward runs again.

    Args:
        sending: the way to prefetch.
    """

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self._next_key: dict[Key, Key | None] = {}  # the next key; None after a wrong prediction
        self._last_key: Key | None = None
        self._under_way: deque[_Prefetch] = deque()
        self._backward_id = -1  # autograd's id of the running backward, -1 outside of one

    def restart(self) -> None:
        """Go back to the beginning of the order, and forget prefetches under way.

        Called when a forward or backward begins.
        """
        self._last_key = None
        self._under_way.clear()

    def drop(self) -> None:
        """Wait for prefetches that are under way, and drop their results."""
        for prefetch in self._under_way:
            with suppress(Exception):  # the next communication raises the error
                prefetch.group.take(prefetch.first)
        self.restart()

    def record_gather(self, key: Key) -> _Prefetch | None:
        """Record that the parameters of ``key`` are gathered, and return their prefetch or None.

        If another key was prefetched, the prediction was wrong: it is not made again, and the
        prefetches under way are forgotten.
        """
        task = torch._C._current_graph_task_id()
        if task != self._backward_id:
            self._backward_id = task
            self.restart()
        prefetch = self._under_way.popleft() if self._under_way else None
        if prefetch is not None and prefetch.key != key:
            self._next_key[prefetch.after] = None
            self._under_way.clear()
            prefetch = None
        if self._last_key is not None:
            self._next_key.setdefault(self._last_key, key)
        self._last_key = key
        return prefetch

    def prefetch_next(self, key: Key, wanted_for: Callable[[Key], list[Wanted]]) -> None:
        """Start to prefetch the parameters that came after ``key`` the last time.

        Nothing is started while too many prefetches are under way: more than one by messages, or
        any in a thread.

        Args:
            key: stands for the parameters that are being gathered now.
            wanted_for: (key) -> the shards, specs and codecs of its parameters.
        """
        by_messages = self._sending.group_bytes > 0
        if check_mode.enabled or (switches.messages if by_messages else switches.threads):
            return
        if len({id(prefetch.group) for prefetch in self._under_way}) > by_messages:
            return
        following = self._expected_after(key, wanted_for)
        wanted = [each for *_, parts in following for each in parts]
        if not wanted:
            return
        group, first = _PrefetchGroup(self._sending, wanted), 0
        for previous_key, next_key, own_wanted in following:
            parts = [(local, local._version, dst) for local, _, dst, _ in own_wanted]
            self._under_way.append(_Prefetch(previous_key, next_key, parts, group, first))
            first += len(own_wanted)

    def _expected_after(
        self, key: Key, wanted_for: Callable[[Key], list[Wanted]]
    ) -> list[tuple[Key, Key, list[Wanted]]]:
        """Return the keys that are expected next, as many as are worth one message.

        Each is (the key before it, the key, its parameters).

        Args:
            key: stands for the parameters that are being gathered now.
            wanted_for: (key) -> the shards, specs and codecs of its parameters.
        """
        current_key = self._under_way[-1].key if self._under_way else key
        seen_keys = {key, *(prefetch.key for prefetch in self._under_way)}
        expected: list[tuple[Key, Key, list[Wanted]]] = []
        nbytes = 0
        while nbytes <= self._sending.group_bytes:
            following = self._next_key.get(current_key)
            if following is None or (following in seen_keys and expected):
                break
            own_wanted = wanted_for(following)
            expected.append((current_key, following, own_wanted))
            nbytes += 1 + sum(dst.largest_nbytes for _, _, dst, _ in own_wanted)
            seen_keys.add(following)
            current_key = following
        return expected


def take_prefetched(prefetch: _Prefetch | None, local: Tensor, dst: TensorSpec) -> Tensor | None:
    """Return the values of a parameter's shard gathered to ``dst``, if they were prefetched.

    None if not, or if the shard was written to since.

    Args:
        prefetch: the prefetch; None without one.
        local: the shard.
        dst: the spec to gather it to.
    """
    if prefetch is None:
        return None
    for i, (shard, writes, spec) in enumerate(prefetch.parts):
        is_same_shard = torch._C._is_alias_of(shard, local)  # type: ignore[attr-defined]
        if is_same_shard and spec is dst and writes == local._version:
            return prefetch.group.take(prefetch.first + i)
    return None


def take_all_prefetched(
    prefetch: _Prefetch | None, wanted: Sequence[ToGather]
) -> list[Tensor] | None:
    """Return the prefetched values of all of ``wanted``; None if any is missing."""
    values = [take_prefetched(prefetch, each.param, each.dst) for each in wanted]
    return None if any(x is None for x in values) else values  # type: ignore[return-value]


class GatherOrders:
    """The orders in which one module gathers parameters: in forward, in backward, in recomputation.

    Recomputation is a forward that backward runs again, as under a checkpoint.

    Args:
        sending: the way to prefetch.
    """

    def __init__(self, sending: Sending) -> None:
        self._sending = sending
        self.forward, self.recomputation, self.backward = (GatherOrder(sending) for _ in range(3))

    def current_order(self) -> GatherOrder:
        """Return the order of the forward that is running.

        One that runs inside a backward, as under a checkpoint, has an order of its own.
        """
        return self.forward if torch._C._current_graph_task_id() == -1 else self.recomputation

    def begin_forward(self, module: Any, args: Any) -> None:
        """Start the order of forward from the beginning (forward pre-hook of the whole module)."""
        self.current_order().restart()

    def drop(self) -> None:
        """Wait for prefetches that are under way in all orders, and drop their results."""
        for order in (self.forward, self.recomputation, self.backward):
            order.drop()

    def __deepcopy__(self, memo: dict) -> GatherOrders:
        return self

    def __reduce__(self) -> Any:
        # Unpickling must not run the collective that prefetching in a thread needs, which checks
        # all ranks for spare cores. So an order with a thread is unpickled as one without
        # prefetching.
        by_messages = self._sending.group_bytes > 0
        return GatherOrders, (self._sending if by_messages else no_prefetch(),)
