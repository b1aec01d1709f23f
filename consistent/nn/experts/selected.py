"""Deferred values of a loop over experts, each in place of a tensor that is not computed yet.

They are selected tokens, the results of an expert, and results times weights.

```
idx, top_x = torch.where(mask[e])        MaskIndices x 2           mask[e]: [k, tokens]
rows = x[None, top_x].reshape(-1, d)     SelectedEntries of x
made = expert(rows)                      ExpertResult of rows
made = made * w[top_x, idx, None]        ExpertResult, scaled by SelectedEntries of w
out.index_add_(0, top_x, made)           an addend of out (loop.py)
```

Each value knows the mask whose entries select its rows, so a whole loop becomes (tokens, masks,
weights) of fixed shapes. Anything else that a program does with such a value computes it:
``materialize`` returns what torch would have returned.
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


def memory_id(x: Any) -> int:
    """Return an identifier of the memory of ``x``; tensors that share memory have the same."""
    return plain(x).untyped_storage()._cdata if x.layout is torch.strided else id(x)


def materialize(value: Any) -> Any:
    """Return ``value``, which may be nested, with a computed tensor for each ``Selected`` in it."""
    return _map_selected(value, Selected.materialize)


def materialize_closed(value: Any) -> Any:
    """Return ``value`` with a computed tensor for each ``Selected`` in it that is closed.

    A value is closed if operations on it can no longer be deferred, for example because its source
    was overwritten.
    """
    return _map_selected(value, lambda x: x.materialize() if x.is_closed else x)


def _map_selected(value: Any, convert: Callable[[Selected], Any]) -> Any:
    """Return ``value``, which may be nested, with ``convert(x)`` for each ``Selected`` x in it."""
    if isinstance(value, Selected):
        return convert(value)
    if type(value) in (list, tuple):
        return type(value)(_map_selected(x, convert) for x in value)
    if type(value) is dict:
        return {key: _map_selected(x, convert) for key, x in value.items()}
    return value


def _is_in_autograd_function() -> bool:
    """Return whether the forward of an autograd Function that was written in Python is running."""
    forwards = _codes_of_autograd_forwards(torch.autograd.Function)
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code in forwards:
            return True
        frame = frame.f_back
    return False


def _codes_of_autograd_forwards(cls: type) -> set[CodeType]:
    """Return the code of ``forward`` of each subclass of ``cls``, without decorators.

    The call of ``apply`` is no sign that a forward runs: since torch 2.15 it has no frame.
    """
    codes = set()
    for subclass in cls.__subclasses__():
        codes |= _codes_of_autograd_forwards(subclass)
        forward = inspect.unwrap(subclass.__dict__.get("forward", subclass))
        if isinstance(forward, FunctionType):
            codes.add(forward.__code__)
    return codes


class Selected:
    """A value in a loop over experts that stands for a tensor which is not computed yet.

    Operations that select, weight and add such values are deferred, too. Any other use computes the
    tensor (``materialize``), so programs see what torch would have returned.

    Args:
        loop: the loop to which it belongs (``loop.Loop``).
    """

    _computed: Any = None
    _is_closed = False
    __hash__ = object.__hash__  # of the object, while ``==`` compares values

    def __init__(self, loop: Any) -> None:
        self.loop = loop
        loop.deferred_values[next(loop.numbers)] = self

    def materialize(self) -> Tensor:
        """Return the tensor that torch would have returned in place of this value.

        Raises:
            RuntimeError: an autograd Function was given the value and reads it. Since the value is
                no tensor, the Function would give it no gradient.
        """
        if self.loop.records and not torch.is_grad_enabled() and _is_in_autograd_function():
            raise RuntimeError(
                "An autograd Function (or a reentrant checkpoint) was given the tokens that a loop "
                'over experts selects, or the result of an expert. Under "expert" these are '
                "computed after the loop, so the Function would lose their gradient.\n"
                "  Give it a copy, which is computed at once: MyFunction.apply(x.clone())."
            )
        if self._computed is None:
            self.loop.settle_old_rows()
        if self._computed is None:
            self._computed = self.loop.compute_deferred(self)
        return self._computed

    def close(self) -> None:
        """Compute the value, and from here on run operations on it at once.

        Called before the value or one of its sources changes.
        """
        self.materialize()
        self._is_closed = True

    @property
    def is_closed(self) -> bool:
        """Return whether operations on the value run at once, and are not deferred.

        They do after ``close``, and while the loop is paused.
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

    def memory_ids(self) -> set[int]:
        """Return identifiers (``memory_id``) of the memory whose writes may change the value."""
        own_value = [self._computed] if isinstance(self._computed, Tensor) else []
        identifiers = set(map(memory_id, (*self.sources(), *own_value)))
        return identifiers.union(*(part.memory_ids() for part in self.parts()))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("register_") or name == "retain_grad":  # a hook needs the tensor itself
            self.loop.before_write(self.materialize())
        return getattr(self.materialize(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("data", "grad", "requires_grad"):
            self.loop.before_write(self.materialize())
            setattr(self.materialize(), name, materialize(value))
        else:
            super().__setattr__(name, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Inside the loop its mode comes first; this is for values that are kept longer.
        return func(*materialize(args), **materialize(kwargs or {}))


def _method_of_tensor(name: str) -> Callable[..., Any]:
    """Return a method that computes the value, and calls the tensor's method ``name``."""

    def method(self: Selected, *args: Any) -> Any:
        return getattr(self.materialize(), name)(*materialize(args))

    return method


for _name in """len iter bool int float index contains getitem setitem neg pos abs invert
    add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul
    and rand or ror xor rxor lt le gt ge eq ne""".split():
    setattr(Selected, f"__{_name}__", _method_of_tensor(f"__{_name}__"))


class MaskIndices(Selected):
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


class SelectedEntries(Selected):
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
        return self.source[materialize(self.index)].reshape(shape)

    @property
    def are_rows(self) -> bool:
        """Return whether the value is [entries, features], as an expert takes it."""
        return len(self.form) == 2 and self.form[0] is None

    @property
    def is_column(self) -> bool:
        """Return whether the value is [entries, 1], as weights of rows are."""
        return self.form == (None, 1)

    @property
    def has_all_mask_dims(self) -> bool:
        """Return whether the leading dims of ``source`` are the dims of the mask, in order."""
        return self.dims == tuple(range(self.mask.ndim))

    def _in_shape(self, form: Form | None, reshape: Callable[[Tensor], Tensor]) -> Any:
        """Return this value in another shape; the reshape is deferred if ``form`` is known.

        Args:
            form: the shape; None if the reshape cannot be deferred.
            reshape: (this value, computed) -> the reshaped tensor.
        """
        if form is None or self.is_closed:
            return reshape(self.materialize())
        return SelectedEntries(self.loop, self.source, self.mask, self.dims, self.index, form)

    def reshape(self, *sizes: Any) -> Any:
        return self._in_shape(
            _shape_after_reshape(self.form, sizes), lambda x: x.reshape(*materialize(sizes))
        )

    view = reshape

    def unsqueeze(self, dim: int) -> Any:
        position = dim + len(self.form) + 1 if dim < 0 else dim
        form = (*self.form[:position], 1, *self.form[position:])
        return self._in_shape(form, lambda x: x.unsqueeze(dim))

    def __getitem__(self, index: Any) -> Any:
        form = _shape_after_index(self.form, index)
        return self._in_shape(form, lambda x: x[materialize(index)])

    def __mul__(self, other: Any) -> Any:
        is_scale = isinstance(other, ExpertResult) and not self.is_closed
        return other * self if is_scale else self.materialize() * materialize(other)

    mul = __mul__

    def __add__(self, other: Any) -> Any:
        if isinstance(other, ExpertResult) and not (self.is_closed or other.is_closed):
            return IncrementedRows(self.loop, self, other)
        return self.materialize() + materialize(other)

    __iadd__ = __add__

    def to(self, *args: Any, **kwargs: Any) -> Any:
        if self.source.dtype in (args[0] if args else None, kwargs.get("dtype")):
            return self
        return self.materialize().to(*materialize(args), **materialize(kwargs))


class ExpertResult(Selected):
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
        rows: SelectedEntries,
        scales: tuple[SelectedEntries | float, ...] = (),
        steps: tuple[Callable[[Tensor], Tensor], ...] = (),
    ) -> None:
        super().__init__(loop)
        self.expert, self.rows, self.scales, self.steps = expert, rows, scales, steps

    def sources(self) -> list[Tensor]:
        return [x for each in self.parts() for x in each.sources()]

    def parts(self) -> list[SelectedEntries]:  # type: ignore[override]
        return [self.rows, *(each for each in self.scales if isinstance(each, SelectedEntries))]

    def snapshot(self) -> ExpertResult:
        """Return a copy of this value, which a later ``*=`` to this one does not change."""
        copy = ExpertResult(self.loop, self.expert, self.rows, self.scales, self.steps)
        copy._computed = self._computed
        return copy

    def compute(self) -> Tensor:
        result = self.loop.run_expert(self.expert, self.rows.materialize())
        for step in self.steps:
            result = step(result)
        return result

    def _with_step(self, step: Callable[[Tensor], Tensor], *scales: SelectedEntries | float) -> Any:
        """Return the value after one more function.

        Args:
            step: the function, from tensor to tensor.
            scales: the factors by which it multiplies; none if it only casts or reshapes.
        """
        if self.is_closed:
            return step(self.materialize())
        all_scales = (*self.scales, *scales)
        return ExpertResult(self.loop, self.expert, self.rows, all_scales, (*self.steps, step))

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, SelectedEntries):
            if (
                other.is_column
                and not other.is_closed
                and self.loop.have_same_entries(other, self.rows)
            ):
                return self._with_step(lambda x: x * other.materialize(), other)
        elif type(other) in (int, float):
            return self._with_step(lambda x: x * other, other)
        return self.materialize() * materialize(other)

    __rmul__ = mul = __mul__

    def __imul__(self, other: Any) -> Any:
        product = self * other
        if isinstance(product, ExpertResult) and self._computed is None:
            self.scales, self.steps = product.scales, product.steps  # other references see it, too
        else:
            self.materialize().mul_(materialize(other))
        return self

    def to(self, *args: Any, **kwargs: Any) -> Any:
        # An addend is cast to the dtype of the sum in any case.
        return self._with_step(lambda x: x.to(*materialize(args), **materialize(kwargs)))

    def type_as(self, other: Any) -> Any:
        return self._with_step(lambda x: x.type_as(materialize(other)))

    def squeeze(self, dim: int) -> Any:
        # Only rows of several features are added (loop.py), and of these squeeze removes no dim.
        return (
            self._with_step(lambda x: x.squeeze(dim))
            if dim == 1
            else self.materialize().squeeze(dim)
        )

    def __radd__(self, other: Any) -> Any:
        return materialize(other) + self.materialize()


class IncrementedRows(Selected):
    """The sum of selected rows and an expert's result, not computed.

    In ``x[index] += made`` Python computes ``x[index] + made``, which is this value, and then
    stores it in ``x[index]``.

    Args:
        base: the rows.
        result: the expert's result.
    """

    def __init__(self, loop: Any, base: SelectedEntries, result: ExpertResult) -> None:
        super().__init__(loop)
        self.base, self.result = base, result.snapshot()

    def sources(self) -> list[Tensor]:
        return [x for each in self.parts() for x in each.sources()]

    def parts(self) -> list[Selected]:
        return [self.base, self.result]

    def compute(self) -> Tensor:
        return self.base.materialize() + self.result.materialize()


# -- shapes ----------------------------------------------------------------------------------------


def select_entries(loop: Any, source: Tensor, index: Any) -> SelectedEntries | None:
    """Return ``source[index]`` as a deferred value; None if ``index`` has an unsupported form.

    The index must select the entries of one mask, by the mask itself or by ``MaskIndices`` of
    it. None may come before and after these, whole slices after them, and ints anywhere.
    """
    items = list(index) if isinstance(index, tuple) else [index]
    masks = [_mask_and_dims(each) for each in items]
    where = [i for i, each in enumerate(masks) if each is not None]
    ints = [i for i, each in enumerate(items) if type(each) is int]
    if not where or len({id(masks[i][0]) for i in where}) > 1:  # type: ignore[index]
        return None
    between = [
        each
        for i, each in enumerate(items[where[0] : where[-1]], where[0])
        if i not in (*where, *ints)
    ]
    if between or any(
        each is not None for i, each in enumerate(items[: where[0]]) if i not in ints
    ):
        return None
    mask, dims = masks[where[0]][0], tuple(d for i in where for d in masks[i][1])  # type: ignore[index]
    sliced_source, mask_items = _without_ints(source, items, masks)
    lead = tuple(1 for i, each in enumerate(items[: where[0]]) if i not in ints)
    rest = [each for i, each in enumerate(items) if i > where[-1] and i not in ints]
    if sliced_source.ndim < len(dims) or len(set(dims)) < len(dims):
        return None
    if any(sliced_source.shape[i] != mask.shape[d] for i, d in enumerate(dims)):
        return None
    trailing = _shape_after_index((None, *sliced_source.shape[len(dims) :]), (slice(None), *rest))
    if trailing is None:
        return None
    return SelectedEntries(loop, sliced_source, mask, dims, tuple(mask_items), lead + trailing)


def _mask_and_dims(item: Any) -> tuple[Tensor, tuple[int, ...]] | None:
    """Return the mask that an index selects by, and which of its dims; None for other indices."""
    if isinstance(item, MaskIndices):
        return item.mask, (item.dim,)
    if isinstance(item, Tensor) and item.dtype is torch.bool and item.ndim and is_global(item):
        return item, tuple(range(item.ndim))
    return None


def _without_ints(source: Tensor, items: list[Any], masks: list[Any]) -> tuple[Tensor, list[Any]]:
    """Return ``source`` with the ints of an index applied, and the indices by a mask that are left.

    Args:
        source: the tensor.
        items: the index, item by item.
        masks: for each item (mask, dims) if it selects by a mask, else None.
    """
    mask_items, dim = [], 0
    for item, mask in zip(items, masks, strict=True):
        if type(item) is int:
            source = source.select(dim, item)
        elif mask is not None:
            mask_items.append(item)
            dim += 1 if isinstance(item, MaskIndices) else item.ndim
        elif item is not None:
            dim += 1
    return source, mask_items


def _shape_after_index(form: Form, index: Any) -> Form | None:
    """Return the shape of a value of shape ``form`` after ``[index]``; None if it is not known.

    The index may have None, whole slices and an ellipsis: ``[:, None]`` of a value of n entries and
    8 features is [n, 1, 8], as a ``Form`` (None, 8) -> (None, 1, 8).
    """
    items = list(index) if isinstance(index, tuple) else [index]
    kinds = {type(item) for item in items}
    slices = [item for item in items if type(item) is slice]
    if kinds - {type(None), type(Ellipsis), slice} or any(item != slice(None) for item in slices):
        return None
    if items.count(Ellipsis) > 1 or len(slices) > len(form):
        return None
    if Ellipsis not in items:
        items.append(Ellipsis)
    remaining, shape = list(form), list[int | None]()
    for item in items:
        if item is None:
            shape.append(1)
        else:
            n = len(form) - len(slices) if item is Ellipsis else 1
            shape += remaining[:n]
            remaining = remaining[n:]
    return tuple(shape)


def _shape_after_reshape(form: Form, sizes: Any) -> Form | None:
    """Return the shape after ``reshape(*sizes)``; None if it would mix entries with other dims.

    One of the sizes has to be -1, and stand for the number of entries.
    """
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        (sizes,) = sizes
    if not all(type(each) is int for each in sizes) or sizes.count(-1) != 1:
        return None
    shape = tuple(None if each == -1 else each for each in sizes)
    return shape if _sizes_around_entries(shape) == _sizes_around_entries(form) else None


def _sizes_around_entries(form: Form) -> tuple[int, list[int | None]]:
    """Return the elements before the dim of entries, and the sizes after it other than 1.

    A reshape that keeps both keeps each entry's elements together.
    """
    position = form.index(None)
    return prod(form[:position]), [each for each in form[position + 1 :] if each != 1]  # type: ignore[arg-type]
