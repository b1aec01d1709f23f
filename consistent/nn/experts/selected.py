"""Deferred values of a loop over experts, each in place of a tensor that is not computed yet.

They are selected tokens, the results of an expert, and results times weights.

```
idx, top_x = torch.where(mask[e])        Chosen, Chosen            mask[e]: [k, tokens]
rows = x[None, top_x].reshape(-1, d)     Picked of x
made = expert(rows)                      Made by the expert of rows
made = made * w[top_x, idx, None]        Made, scaled by Picked of w
out.index_add_(0, top_x, made)           an addend of out (loop.py)
```

Each value knows the mask whose entries select its rows, so a whole loop becomes (tokens, masks,
weights) of fixed shapes. Anything else that a program does with such a value computes it: ``real``
returns what torch would have returned.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from math import prod
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor

from ...dispatch.plans.shards import is_global, plain

Form = tuple[int | None, ...]  # a shape; None stands for the number of selected entries


def memory(x: Any) -> int:
    """Return an identifier of the memory of ``x``; tensors that share memory have the same."""
    return plain(x).untyped_storage()._cdata if x.layout is torch.strided else id(x)


def real(value: Any) -> Any:
    """Return ``value``, which may be nested, with a computed tensor for each ``Selected`` in it."""
    return _mapped(value, Selected.real)


def closed(value: Any) -> Any:
    """Return ``value`` with a computed tensor for each ``Selected`` in it that is closed.

    A value is closed if operations on it can no longer be deferred, for example because its source
    was overwritten.
    """
    return _mapped(value, lambda x: x.real() if x.is_closed else x)


def _mapped(value: Any, made: Callable[[Selected], Any]) -> Any:
    """Return ``value``, which may be nested, with ``made(x)`` for each ``Selected`` x in it."""
    if isinstance(value, Selected):
        return made(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(x, made) for x in value)
    if type(value) is dict:
        return {key: _mapped(x, made) for key, x in value.items()}
    return value


def _is_in_function() -> bool:
    """Return whether the forward of an autograd Function that was written in Python is running."""
    forwards = _codes_of_forwards(torch.autograd.Function)
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in forwards:
            return True
        frame = frame.f_back
    return False


def _codes_of_forwards(cls: type) -> set[CodeType]:
    """Return the code of ``forward`` of each subclass of ``cls``, without decorators.

    The call of ``apply`` is no sign that a forward runs: since torch 2.15 it has no frame.
    """
    found = set()
    for each in cls.__subclasses__():
        found |= _codes_of_forwards(each)
        forward = inspect.unwrap(each.__dict__.get("forward", each))
        if isinstance(forward, FunctionType):
            found.add(forward.__code__)
    return found


class Selected:
    """A value in a loop over experts that stands for a tensor which is not computed yet.

    Operations that select, weight and add such values are deferred, too. Any other use computes the
    tensor (``real``), so programs see what torch would have returned.

    Args:
        loop: the loop to which it belongs (``loop.Loop``).
    """

    _real: Any = None
    _is_closed = False
    __hash__ = object.__hash__  # of the object, while ``==`` compares values

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        loop.live[next(loop.numbers)] = self

    def real(self) -> Tensor:
        """Return the tensor that torch would have returned in place of this value.

        Raises:
            RuntimeError: an autograd Function was given the value and reads it. Since the value is
                no tensor, the Function would give it no gradient.
        """
        if self.loop.records and not torch.is_grad_enabled() and _is_in_function():
            raise RuntimeError(
                "An autograd Function (or a reentrant checkpoint) was given the tokens that a loop "
                'over experts selects, or the result of an expert. Under "expert" these are '
                "computed after the loop, so the Function would lose their gradient.\n"
                "  Give it a copy, which is computed at once: MyFunction.apply(x.clone())."
            )
        if self._real is None:
            self.loop.settle()
        if self._real is None:
            self._real = self.loop.computed(self)
        return self._real

    def close(self) -> None:
        """Compute the value, and from here on run operations on it at once.

        Called before the value or one of its sources changes.
        """
        self.real()
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        """Return whether operations on the value run at once, and are not deferred.

        So it is after ``close``, and while the loop is paused.
        """
        return self._is_closed or self.loop.is_paused

    def compute(self) -> Tensor:
        """Return the tensor, computed from the sources; each subclass defines this."""
        raise NotImplementedError

    def sources(self) -> list[Tensor]:
        """Return the tensors from which ``compute`` computes the value."""
        raise NotImplementedError

    def parts(self) -> list[Selected]:
        """Return the other ``Selected`` values from which ``compute`` computes this one."""
        return []

    def memories(self) -> set[int]:
        """Return identifiers (``memory``) of the memory to which a write may change the value."""
        here = [self._real] if isinstance(self._real, Tensor) else []
        found = set(map(memory, (*self.sources(), *here)))
        return found.union(*(part.memories() for part in self.parts()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_") or name == "retain_grad":  # a hook needs the tensor itself
            self.loop.before_write(self.real())
        return getattr(self.real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("data", "grad", "requires_grad"):
            self.loop.before_write(self.real())
            setattr(self.real(), name, real(value))
        else:
            super().__setattr__(name, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inside the loop its mode comes first; this is for values that are kept longer.
        return func(*real(args), **real(kwargs or {}))


def _delegated(name: str) -> Callable[..., Any]:
    """Return a method that computes the value, and calls the tensor's method ``name``."""

    def method(self: Selected, *args: Any) -> Any:
        return getattr(self.real(), name)(*real(args))

    return method


for _name in """len iter bool int float index contains getitem setitem neg pos abs invert
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
    and rand or ror xor rxor lt le gt ge eq ne""".split():
    setattr(Selected, f"__{_name}__", _delegated(f"__{_name}__"))


class Chosen(Selected):
    """One of the results of ``torch.where(mask)``, not computed: [entries].

    Args:
        mask: a global tensor.
        dim: the dim of the mask along which it has the indices of all entries that are not zero.
    """

    def __init__(self, loop: Any, mask: Tensor, dim: int) -> None:
        super().__init__(loop)
        self.mask, self.dim = mask, dim

    def sources(self) -> list[Tensor]:
        return [self.mask]

    def compute(self) -> Tensor:
        return self.loop.indices(self.mask)[self.dim]


class Picked(Selected):
    """Entries of a tensor that a mask selects, as ``x[top_x]`` after ``torch.where(mask)``.

    Args:
        source: the tensor, [d0, ..., trailing dims], where d0, ... are dims of the mask.
        mask: the mask.
        dims: for each of d0, ... the dim of the mask that it is.
        index: the index of ``source`` that selects the entries.
        form: the shape of the result; None in it stands for the number of selected entries.
    """

    def __init__(
        self,
        loop: Any,
        source: Tensor,
        mask: Tensor,
        dims: tuple[int, ...],
        index: tuple[Any, ...],
        form: Form,
    ) -> None:
        super().__init__(loop)
        self.source, self.mask, self.dims, self.index, self.form = source, mask, dims, index, form

    def sources(self) -> list[Tensor]:
        return [self.source, self.mask]

    def parts(self) -> list[Selected]:
        return [each for each in self.index if isinstance(each, Selected)]

    def compute(self) -> Tensor:
        shape = [-1 if size is None else size for size in self.form]
        return self.source[real(self.index)].reshape(shape)

    @property
    def are_rows(self) -> bool:
        """Return whether the value is [entries, features], as an expert takes it."""
        return len(self.form) == 2 and self.form[0] is None

    @property
    def is_column(self) -> bool:
        """Return whether the value is [entries, 1], as weights of rows are."""
        return self.form == (None, 1)

    @property
    def is_of_whole(self) -> bool:
        """Return whether the leading dims of ``source`` are the dims of the mask, in order."""
        return self.dims == tuple(range(self.mask.ndim))

    def _formed(self, form: Form | None, again: Callable[[Tensor], Tensor]) -> Any:
        """Return this value in another shape; the reshape is deferred if ``form`` is known.

        Args:
            form: the shape; None if the reshape cannot be deferred.
            again: (this value, computed) -> the reshaped tensor.
        """
        if form is None or self.is_closed:
            return again(self.real())
        return Picked(self.loop, self.source, self.mask, self.dims, self.index, form)

    def reshape(self, *sizes: Any) -> Any:
        return self._formed(_reshaped(self.form, sizes), lambda x: x.reshape(*real(sizes)))

    view = reshape

    def unsqueeze(self, dim: int) -> Any:
        at = dim + len(self.form) + 1 if dim < 0 else dim
        form = (*self.form[:at], 1, *self.form[at:])
        return self._formed(form, lambda x: x.unsqueeze(dim))

    def __getitem__(self, index: Any) -> Any:
        form = _indexed(self.form, index)
        return self._formed(form, lambda x: x[real(index)])

    def __mul__(self, other: Any) -> Any:
        is_scale = isinstance(other, Made) and not self.is_closed
        return other * self if is_scale else self.real() * real(other)

    mul = __mul__

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Made) and not (self.is_closed or other.is_closed):
            return Raised(self.loop, self, other)
        return self.real() + real(other)

    __iadd__ = __add__

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.source.dtype in (args[0] if args else None, kwargs.get("dtype")):
            return self
        return self.real().to(*real(args), **real(kwargs))


class Made(Selected):
    """The result of an expert for selected rows, times weights; not computed: [entries, features].

    Args:
        expert: the index of the expert.
        rows: the rows that it gets.
        scales: the weights and numbers by which the result is multiplied.
        steps: the functions that compute the value from the expert's result, in order.
    """

    def __init__(
        self,
        loop: Any,
        expert: int,
        rows: Picked,
        scales: tuple[Picked | float, ...] = (),
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
    ) -> None:
        super().__init__(loop)
        self.expert, self.rows, self.scales, self.steps = expert, rows, scales, steps

    def sources(self) -> list[Tensor]:
        return [x for each in self.parts() for x in each.sources()]

    def parts(self) -> list[Picked]:  # type: ignore[override]
        return [self.rows, *(each for each in self.scales if isinstance(each, Picked))]

    def now(self) -> Made:
        """Return a copy of this value, which a later ``*=`` to this one does not change."""
        made = Made(self.loop, self.expert, self.rows, self.scales, self.steps)
        made._real = self._real
        return made

    def compute(self) -> Tensor:
        made = self.loop.of_one(self.expert, self.rows.real())
        for step in self.steps:
            made = step(made)
        return made

    def _then(self, step: Callable[[Tensor], Tensor], *scales: Picked | float) -> Any:
        """Return the value after one more function.

        Args:
            step: the function, from tensor to tensor.
            scales: the factors by which it multiplies; none if it only casts or reshapes.
        """
        if self.is_closed:
            return step(self.real())
        every = (*self.scales, *scales)
        return Made(self.loop, self.expert, self.rows, every, (*self.steps, step))

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Picked):
            if other.is_column and not other.is_closed and self.loop.alike(other, self.rows):
                return self._then(lambda x: x * other.real(), other)
        elif type(other) in (int, float):
            return self._then(lambda x: x * other, other)
        return self.real() * real(other)

    __rmul__ = mul = __mul__

    def __imul__(self, other: Any) -> Any:
        made = self * other
        if isinstance(made, Made) and self._real is None:
            self.scales, self.steps = made.scales, made.steps  # other references see it, too
        else:
            self.real().mul_(real(other))
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        # An addend is cast to the dtype of the sum in any case.
        return self._then(lambda x: x.to(*real(args), **real(kwargs)))

    def type_as(self, other: Any) -> Any:
        return self._then(lambda x: x.type_as(real(other)))

    def squeeze(self, dim: int) -> Any:
        # Only rows of several features are added (loop.py), and of these squeeze removes no dim.
        return self._then(lambda x: x.squeeze(dim)) if dim == 1 else self.real().squeeze(dim)

    def __radd__(self, other: Any) -> Any:
        return real(other) + self.real()


class Raised(Selected):
    """The sum of selected rows and an expert's result, not computed.

    In ``x[index] += made`` Python computes ``x[index] + made``, which is this value, and then
    stores it in ``x[index]``.

    Args:
        base: the rows.
        made: the expert's result.
    """

    def __init__(self, loop: Any, base: Picked, made: Made) -> None:
        super().__init__(loop)
        self.base, self.made = base, made.now()

    def sources(self) -> list[Tensor]:
        return [x for each in self.parts() for x in each.sources()]

    def parts(self) -> list[Selected]:
        return [self.base, self.made]

    def compute(self) -> Tensor:
        return self.base.real() + self.made.real()


# -- shapes ----------------------------------------------------------------------------------------


def picked(loop: Any, source: Tensor, index: Any) -> Picked | None:
    """Return ``source[index]`` as a deferred value; None if ``index`` has an unsupported form.

    The index must select the entries of one mask, by the mask itself or by ``Chosen`` indices of
    it. None may come before and after these, whole slices after them, and ints anywhere.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    found = [_mask_and_dims(each) for each in items]
    at = [i for i, each in enumerate(found) if each is not None]
    ints = [i for i, each in enumerate(items) if type(each) is int]
    if not at or len({id(found[i][0]) for i in at}) > 1:  # type: ignore[index]
        return None
    between = [each for i, each in enumerate(items[at[0] : at[-1]], at[0]) if i not in (*at, *ints)]
    if between or any(each is not None for i, each in enumerate(items[: at[0]]) if i not in ints):
        return None
    mask, dims = found[at[0]][0], tuple(d for i in at for d in found[i][1])  # type: ignore[index]
    plain, kept = _without_ints(source, items, found)
    lead = tuple(1 for i, each in enumerate(items[: at[0]]) if i not in ints)
    rest = [each for i, each in enumerate(items) if i > at[-1] and i not in ints]
    if plain.ndim < len(dims) or len(set(dims)) < len(dims):
        return None
    if any(plain.shape[i] != mask.shape[d] for i, d in enumerate(dims)):
        return None
    trailing = _indexed((None, *plain.shape[len(dims) :]), (slice(None), *rest))
    if trailing is None:
        return None
    return Picked(loop, plain, mask, dims, tuple(kept), lead + trailing)


def _mask_and_dims(item: Any) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return the mask that an index selects by, and which of its dims; None for other indices."""
    if isinstance(item, Chosen):
        return item.mask, (item.dim,)
    if isinstance(item, Tensor) and item.dtype is torch.bool and item.ndim and is_global(item):
        return item, tuple(range(item.ndim))
    return None


def _without_ints(source: Tensor, items: list[Any], found: list[Any]) -> tuple[Tensor, list[Any]]:
    """Return ``source`` with the ints of an index applied, and the indices by a mask that are left.

    Args:
        source: the tensor.
        items: the index, item by item.
        found: for each item (mask, dims) if it selects by a mask, else None.
    """
    kept, dim = [], 0
    for item, each in zip(items, found, strict=True):
        if type(item) is int:
            source = source.select(dim, item)
        elif each is not None:
            kept.append(item)
            dim += 1 if isinstance(item, Chosen) else item.ndim
        elif item is not None:
            dim += 1
    return source, kept


def _indexed(form: Form, index: Any) -> Form | None:
    """Return the shape of a value of shape ``form`` after ``[index]``; None if it is not known.

    The index may have None, whole slices and an ellipsis: ``[:, None]`` of a value of n entries and
    8 features is [n, 1, 8], as a ``Form`` (None, 8) -> (None, 1, 8).
    """
    items = list(index) if isinstance(index, tuple) else [index]
    kinds = {type(each) for each in items}
    slices = [each for each in items if type(each) is slice]
    if kinds - {type(None), type(Ellipsis), slice} or any(each != slice(None) for each in slices):
        return None
    if items.count(Ellipsis) > 1 or len(slices) > len(form):
        return None
    if Ellipsis not in items:
        items.append(Ellipsis)
    left, made = list(form), list[int | None]()
    for each in items:
        if each is None:
            made.append(1)
        else:
            n = len(form) - len(slices) if each is Ellipsis else 1
            made += left[:n]
            left = left[n:]
    return tuple(made)


def _reshaped(form: Form, sizes: Any) -> Form | None:
    """Return the shape after ``reshape(*sizes)``; None if it would mix entries with other dims.

    One of the sizes has to be -1, and stand for the number of entries.
    """
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        (sizes,) = sizes
    if not all(type(each) is int for each in sizes) or sizes.count(-1) != 1:
        return None
    made = tuple(None if each == -1 else each for each in sizes)
    return made if _around(made) == _around(form) else None


def _around(form: Form) -> tuple[int, list[int | None]]:
    """Return the elements before the dim of entries, and the sizes after it other than 1.

    A reshape that keeps both keeps each entry's elements together.
    """
    at = form.index(None)
    return prod(form[:at]), [each for each in form[at + 1 :] if each != 1]  # type: ignore[arg-type]
