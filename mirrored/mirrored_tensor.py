"""MirroredTensor: this rank's element of a list that has one element on each device.

The object is the element, a ``torch.Tensor`` subclass: ops on it are torch's and run on this rank
only. How the elements make up a logical tensor is unknown until ``to_global`` is called. The class
exists so that such an element is never mistaken for a tensor that is the same on all ranks.
"""

from __future__ import annotations

import copy as _copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .comm import Ranks
from .every_rank import gather_from_ranks
from .transports.default import current

# Inside it, ops do not call `__torch_function__` of subclasses: they run as on plain tensors.
_HookOff = torch._C.DisableTorchFunctionSubclass
_Tensor = torch.Tensor

# (x, sbp, placement, shape, check) -> the global tensor that x's elements make up. The package with
# global tensors sets this, because mirrored/ must not import it.
_to_global: Callable[..., Any] | None = None


def register_to_global(convert: Callable[..., Any]) -> None:
    """Register the function that implements ``MirroredTensor.to_global``.

    The package with global tensors calls this when it is imported, because mirrored/ must not
    import it. ``convert(x, sbp, placement, shape, check)`` returns the global tensor.
    """
    global _to_global
    _to_global = convert


class MirroredTensor(torch.Tensor):
    """This rank's element of a list that has one element on each of the world ranks ``ranks``.

    ``scatter`` and ``from_local`` make it. Ops on it are torch's, run on this rank only, and give
    mirrored tensors. On a rank that is not in ``ranks`` it is a ``meta`` tensor, so that all ranks
    can run the same program.
    """

    _ranks: Ranks

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not all(issubclass(cls, other) for other in types):
            return NotImplemented  # so that torch asks the other class
        kwargs = kwargs or {}
        ranks = _common_ranks(func, (args, kwargs))
        with _HookOff():
            out = func(*args, **kwargs)
        _make_mirrored(out, ranks)
        return out

    @property
    def ranks(self) -> Ranks:
        """World ranks of the devices: element k of the list is on ``ranks[k]``."""
        return self._ranks

    def to_local(self) -> torch.Tensor:
        """Return this element as a plain tensor with the same storage and autograd history."""
        with _HookOff():
            return self.as_subclass(_Tensor)  # type: ignore[arg-type]

    def to_list(self) -> list[torch.Tensor]:
        """Return all elements as plain tensors, on every rank of the world. A collective.

        The result has no autograd history.

        ```
        rank 0   rank 1   rank 2             rank 0    rank 1    rank 2
          a        b        c       --->     a b c     a b c     a b c
        ```
        """
        transport = current()
        all_ranks = tuple(range(transport.size))
        own_element = self.to_local().detach()
        device = _receiving_device(own_element)
        # Elements may differ in shape (the pieces of a tensor that does not split evenly).
        notes = gather_from_ranks((tuple(own_element.shape), own_element.dtype), all_ranks)
        shapes = [notes[rank][0] for rank in self._ranks]
        dtypes = {notes[rank][1] for rank in self._ranks}
        if len(dtypes) > 1:
            raise ValueError(
                f"to_list: the elements have the dtypes {sorted(map(str, dtypes))}.\n"
                "  The elements of a mirrored tensor are of one dtype.\n"
                "  Convert them on each rank first: x.to(torch.float32)."
            )
        if len(self._ranks) == len(all_ranks):
            return transport.all_gather(own_element, shapes, self._ranks)
        # Ranks outside `ranks` get the elements too, and `all_gather` serves its members only.
        return [
            transport.broadcast(
                own_element if rank == transport.rank else None,
                shape,
                own_element.dtype,
                device,
                rank,
                all_ranks,
            )
            for rank, shape in zip(self._ranks, shapes)
        ]

    def to_global(
        self,
        sbp: Any = None,
        *,
        placement: Any = None,
        shape: Sequence[int] | None = None,
        check: bool = True,
    ) -> Any:
        """Return the one logical tensor that the elements make up; differentiable.

        Args:
            sbp: the layout that the elements have: split(0) (the default) if they are shards to
                concatenate along dim 0, broadcast if they are equal replicas, partial_sum if the
                tensor is their sum; on a grid one of these for each axis.
            placement: the device grid over ``ranks``; by default one axis with all of them.
            shape: the logical shape. If it is given, the ranks need not exchange the shapes that
                they hold.
            check: verify that shapes and dtypes fit together, and for broadcast the values.

        Raises:
            ValueError: the elements do not make up such a tensor.
            RuntimeError: the package that has global tensors was not imported.
        """
        if _to_global is None:
            raise RuntimeError(
                "to_global: the package that has global tensors was not imported.\n"
                "  mirrored/ alone knows only elements.\n"
                "  Add: import consistent."
            )
        return _to_global(self, sbp, placement, shape, check)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{repr(self.to_local())[:-1]}, mirrored over ranks {self._ranks})"

    def __deepcopy__(self, memo: dict) -> MirroredTensor:
        if id(self) not in memo:
            memo[id(self)] = from_local(_copy.deepcopy(self.to_local(), memo), self._ranks)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return (_rebuild, (self.to_local(), self._ranks))


def from_local(element: torch.Tensor, ranks: Sequence[int] | None = None) -> MirroredTensor:
    """Make a mirrored tensor over ``ranks`` (by default all) from this rank's ``element``.

    The result shares storage and autograd history with ``element``. On a rank outside ``ranks``
    only the shape and dtype of ``element`` are read.

    Raises:
        TypeError: ``element`` is not a plain tensor.
        ValueError: ``ranks`` are not ranks of the world, each once.
    """
    if type(element) not in (_Tensor, torch.nn.Parameter):
        raise TypeError(
            f"from_local: element is a {type(element).__name__}, and an element is a plain tensor. "
            f"Use {_plain_tensor_hint(element)}."
        )
    members = _checked_ranks(ranks)
    if current().rank not in members:
        element = torch.empty_like(element, device="meta")
    # A view, since `_make_mirrored` changes the class of the object in place.
    out = element.view_as(element)
    _make_mirrored(out, members)
    return out  # type: ignore[return-value]


def scatter(
    parts: Sequence[Any],
    ranks: Sequence[int] | None = None,
    *,
    device: torch.device | str | None = None,
) -> MirroredTensor:
    """Make a mirrored tensor from a list with one element for each device. Sends nothing.

    Every rank passes the whole list.

    ```
    rank 0   rank 1   rank 2             rank 0   rank 1   rank 2
    a b c    a b c    a b c     --->       a        b        c
    ```

    Element k goes to ``ranks[k]``, by default rank k. Its gradient stays on that rank.

    Args:
        parts: tensors or numpy arrays of equal shapes and dtypes.
        ranks: the rank of each element; by default all ranks of the world in order.
        device: where to put this rank's element; by default it stays where it is.

    Raises:
        TypeError: ``parts`` is not a list or tuple.
        ValueError: there are not as many elements as devices, or shapes or dtypes differ.
    """
    members = _checked_ranks(ranks)
    elements = _checked_parts(parts, members)
    rank = current().rank
    own_element = elements[members.index(rank) if rank in members else 0]
    if device is not None and rank in members:
        own_element = own_element.to(device)
    return from_local(own_element, members)


def _checked_parts(parts: Any, members: Sequence[int]) -> list[torch.Tensor]:
    """Return the elements of ``parts`` as tensors, one for each of ``members``.

    Raises:
        TypeError: ``parts`` is not a list or tuple.
        ValueError: there are not as many elements as devices, or shapes or dtypes differ.
    """
    if not isinstance(parts, list | tuple):
        raise TypeError(
            f"scatter: parts is a {type(parts).__name__}, and a list with one element for each of "
            f"the {len(members)} devices is wanted. Cut it first: torch.chunk(x, {len(members)})."
        )
    if len(parts) != len(members):
        raise ValueError(
            f"scatter: the list has {len(parts)} elements, and there are {len(members)} devices, "
            f"ranks {members}.\n"
            f"  Each device takes one element. Cut the batch into {len(members)} parts."
        )
    elements = [torch.as_tensor(part) for part in parts]
    for k, x in enumerate(elements):
        if x.shape != elements[0].shape or x.dtype != elements[0].dtype:
            raise ValueError(
                f"scatter: element {k} is {x.dtype} {tuple(x.shape)}, and element 0 is "
                f"{elements[0].dtype} {tuple(elements[0].shape)}.\n"
                "  The devices do the same work, on parts of one shape and dtype.\n"
                "  Cut evenly (leave the rest of the batch out, or pad it)."
            )
    return elements


# -- types and ranks ------------------------------------------------------------------------------


def _checked_ranks(ranks: Sequence[int] | None) -> Ranks:
    size = current().size
    members = tuple(range(size)) if ranks is None else tuple(int(rank) for rank in ranks)
    if not members or len(set(members)) != len(members) or not set(members) <= set(range(size)):
        raise ValueError(
            f"mirrored: ranks are {members}, and the world has {size} (0 to {size - 1}).\n"
            "  A mirrored tensor has one element on each of its ranks.\n"
            "  Name ranks of the world, each once, or start more: torchrun --nproc_per_node N."
        )
    return members


def _make_mirrored(value: Any, ranks: Ranks) -> None:
    """Turn the plain tensors in ``value``, the result of an op, into mirrored tensors in place.

    Their class is changed. ``value`` may be a list or tuple of tensors, or anything else.
    """
    if value.__class__ is _Tensor or value.__class__ is MirroredTensor:
        # In place, since an op such as `x.add_(y)` must return the object itself.
        value.__class__ = MirroredTensor
        value._ranks = ranks
    elif isinstance(value, tuple | list):
        for item in value:
            _make_mirrored(item, ranks)


def _mirrored_tensors_in(value: Any) -> Iterator[MirroredTensor]:
    if isinstance(value, MirroredTensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _mirrored_tensors_in(item)
    elif isinstance(value, dict):
        yield from _mirrored_tensors_in(list(value.values()))


def _common_ranks(func: Callable[..., Any], args: Any) -> Ranks:
    tensors = list(_mirrored_tensors_in(args))
    ranks = tensors[0]._ranks
    for x in tensors:
        if x._ranks != ranks:
            raise ValueError(
                f"{getattr(func, '__name__', func)}: one mirrored tensor lies on ranks {ranks}, "
                f"another on {x._ranks}.\n"
                "  Ops on mirrored tensors are local, so both need an element on each device.\n"
                "  Scatter both lists over the same ranks."
            )
    return ranks


def _receiving_device(x: torch.Tensor) -> torch.device:
    """Return the device on which this rank receives the other ranks' elements.

    It is the device of ``x``, or torch's default device on a rank that has no element (``x`` on
    meta).
    """
    return torch.empty(0).device if x.is_meta else x.device


def _plain_tensor_hint(x: Any) -> str:
    if isinstance(x, MirroredTensor):
        return "x.to_local()"
    return "x.to_mirrored()" if hasattr(x, "to_mirrored") else "torch.as_tensor(x)"


def _rebuild(element: torch.Tensor, ranks: Ranks) -> MirroredTensor:
    return from_local(element, ranks)
