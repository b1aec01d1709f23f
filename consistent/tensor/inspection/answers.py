"""Handlers for queries about a tensor that compute nothing, such as ``is_contiguous``.

An answer never communicates, so a single rank may query. It describes the logical tensor or, if it
is about memory and objects that each rank has for itself, this rank's shard. A query whose answer
would mistake the shard for the whole raises and says what to call. ``docs/inspection.md`` has the
table.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from mirrored.transports.default import current

from ...dispatch.planning.functions.questions import refusal
from ...dispatch.planning.functions.torch_functions import handler_name
from ...dispatch.plans.plan import handlers
from ...dispatch.plans.shards import HookOff, attach, is_global, plain
from ...dispatch.running.whole_call import call_whole
from ...movement.world import my_coordinate
from ..global_tensor import GlobalTensor
from .printing import format_value, holds_whole_value, text_of
from .sparse_rows import sparse_mask

_Base: Any = torch.Tensor

# -- answered for the logical tensor ---------------------------------------------------------------


def meta_like(x: Any) -> Any:
    """Return a ``meta`` tensor with the shape, strides and dtype of the logical tensor ``x``.

    Torch answers a query for it in place of ``x``, of which it would see the shard. Anything but a
    global tensor is returned as it is.
    """
    if not is_global(x):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _logical_handler(query: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that calls torch's ``query`` with ``meta_like`` of each argument."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return query(*map(meta_like, args), **{k: meta_like(v) for k, v in kwargs.items()})

    return answer


def _is_contiguous(self: Any, **memory_format: Any) -> bool:
    """Implement ``Tensor.is_contiguous``: whether the logical tensor would be, on one device."""
    with HookOff():
        if _Base.size(self) == self._spec.shape:  # then the shard has the strides of the whole
            return _Base.is_contiguous(self, **memory_format)
    return meta_like(self).is_contiguous(**memory_format)


def _get_device(self: Any) -> int:
    """Implement ``Tensor.get_device``: the index of the shard's device; -1 on a CPU."""
    return -1 if self.device.index is None else self.device.index


def _storage_type(self: Any) -> Any:
    """Implement ``Tensor.storage_type``: that of a plain tensor of this dtype on this device."""
    return torch.empty(0, dtype=self.dtype, device=self.device).storage_type()


def _has_compatible_type(a: Any, b: Any) -> bool:
    """Implement ``torch._has_compatible_shallow_copy_type``: whether both tensors are global.

    ``nn.Module.to`` decides by it whether a parameter may get the data of another tensor.
    """
    return is_global(a) and is_global(b)


def _base(self: Any) -> Any:
    """Implement ``Tensor._base``: the global tensor that this one is a view of, or None."""
    with HookOff():
        base = _Base._base.__get__(self)
    return base if is_global(base) else None


LOGICAL: dict[str, Callable[..., Any]] = {
    "_has_compatible_shallow_copy_type": _has_compatible_type,
    "_is_view": lambda self: _base(self) is not None,
    "dim_order": _logical_handler(_Base.dim_order),
    "get_device": _get_device,
    "is_contiguous": _is_contiguous,
    "is_distributed": _logical_handler(_Base.is_distributed),
    "is_same_size": _logical_handler(_Base.is_same_size),
    "is_signed": _logical_handler(_Base.is_signed),
    "result_type": _logical_handler(torch.result_type),
    "storage_type": _storage_type,
}

LOGICAL_PROPERTIES: dict[str, Callable[[Any], Any]] = {
    "_base": _base,
    "_grad": lambda self: self.grad,
    "_grad_fn": lambda self: self.grad_fn,
}

# -- answered for this rank's shard ----------------------------------------------------------------


def _shard_handler(name: str) -> Callable[..., Any]:
    """Return a handler that calls the method ``name`` of ``torch.Tensor`` on this rank's shard."""
    query = getattr(_Base, name)

    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        with HookOff():
            return query(self, *args, **kwargs)

    return answer


def _is_set_to(self: Any, other: Any) -> bool:
    """Implement ``Tensor.is_set_to``: whether both shards are the same view of the same memory."""
    if not (is_global(self) and is_global(other)) or self._spec is not other._spec:
        return False
    a, b = plain(self), plain(other)
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return same_storage and a.storage_offset() == b.storage_offset() and a.stride() == b.stride()


def _nnz(self: Any) -> int:
    """Implement ``Tensor._nnz``: the number of entries of a sparse tensor.

    It raises if this rank does not hold the whole tensor, since a query sends nothing.
    """
    if self.layout is not torch.strided and not holds_whole_value(self._spec):
        refusal("_nnz")(self)
    return _shard_handler("_nnz")(self)


def _is_coalesced(self: Any) -> bool:
    """Implement ``Tensor.is_coalesced``: whether a sparse tensor has one entry for each index.

    All ranks must return the same, and no query sends anything. So the answer is False if some rank
    of the world does not hold the whole tensor, because it cannot see all entries.
    """
    spec = self._spec
    if self.layout is not torch.strided and (
        spec.placement.size != current().size or not all(e.is_broadcast for e in spec.sbp)
    ):
        return False
    return _shard_handler("is_coalesced")(self)


def _is_shared(self: Any) -> bool:
    """Implement ``Tensor.is_shared``: whether the shard is in shared memory."""
    return plain(self).is_shared()


def _share_memory(self: Any) -> Any:
    """Implement ``Tensor.share_memory_``: move the shard into shared memory."""
    if my_coordinate(self._spec.placement) is not None:
        plain(self).share_memory_()
    return self


def _pin_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Implement ``Tensor.pin_memory``: return a copy whose shards are in pinned memory."""
    if my_coordinate(self._spec.placement) is None:
        torch.empty(0).pin_memory(*args, **kwargs)  # raises here if it raises on the other ranks
        return self.clone()
    return attach(plain(self).pin_memory(*args, **kwargs), self._spec)


# Methods whose answer is the same for the shard and for the logical tensor, or is about the rank's
# own memory and objects. Not every torch has all of them: dims had names before 2.13.
_SHARD_METHODS = """
_dimI _dimV _fix_weakref _is_zerotensor _use_count dense_dim has_names is_conj is_inference is_neg
is_pinned q_per_channel_axis q_scale q_zero_point qscheme record_stream sparse_dim
""".split()
OF_SHARD: dict[str, Callable[..., Any]] = {
    **{name: _shard_handler(name) for name in _SHARD_METHODS if hasattr(_Base, name)},
    "_nnz": _nnz,
    "is_coalesced": _is_coalesced,
    "is_set_to": _is_set_to,
    "is_shared": _is_shared,
    "pin_memory": _pin_memory,
    "share_memory_": _share_memory,
}
# Properties of this kind, as far as the installed torch has them.
_SHARD_PROPERTIES = """
_cdata _has_grad_dtype_override _has_symbolic_sizes_strides _python_dispatch grad_dtype is_ipu
is_maia is_mkldnn is_mps is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla
is_xpu name names output_nr retains_grad volatile
""".split()
OF_SHARD_PROPERTIES = [name for name in _SHARD_PROPERTIES if hasattr(_Base, name)]

# -- parts of sparse and quantized tensors --------------------------------------------------------

# Torch refuses these for a dense tensor, but only when it runs on the values, for which the ranks
# would have to communicate. A single rank may query, so they are refused before that.
_SPARSE_PARTS = """
_indices _to_dense _values ccol_indices coalesce col_indices crow_indices indices row_indices values
""".split()
_QUANTIZED_PARTS = "int_repr q_per_channel_scales q_per_channel_zero_points".split()
# Parts that torch has as functions only, and functions that copy parts.
_SPARSE_PARTS += """
_coalesce _indices_copy _sparse_sum _values_copy ccol_indices_copy col_indices_copy
crow_indices_copy indices_copy row_indices_copy values_copy
""".split()


def _part_handler(name: str, kind: str, has_part: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a handler for the query ``name``, which only tensors of one ``kind`` answer.

    For a dense tensor it raises at once; for others it calls torch's function on the whole value.

    Args:
        name: name of the method or function of torch.
        kind: "sparse" or "quantized", for the error.
        has_part: whether a tensor is of that kind.
    """
    query = getattr(_Base, name, None) or getattr(torch, name)
    refuse = refusal(name, f"it is dense, and {kind} tensors alone have it", "x itself")

    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not has_part(self):
            refuse(self)
        return call_whole(name, query, (self, *args), kwargs)

    return answer


PARTS: dict[str, Callable[..., Any]] = {}
for _name in _SPARSE_PARTS:
    if hasattr(_Base, _name) or hasattr(torch, _name):
        PARTS[_name] = _part_handler(_name, "sparse", lambda x: x.layout is not torch.strided)
for _name in _QUANTIZED_PARTS:
    PARTS[_name] = _part_handler(_name, "quantized", lambda x: x.is_quantized)

# -- what has no answer ----------------------------------------------------------------------------

_NO_NAMES = "the dims of a global tensor have no names"
_SHAPE_IS_IN_THE_SPEC = "its shape is part of its spec, and views of it would keep the old one"
# Callers of these mostly want the value itself, to save it or to pass it on.
_MEMORY = "each rank keeps its shard in a memory of its own"
_SAVE = (
    "x.to_local().{0} for this rank's shard, or x.full(), the whole value, to save or pass on; "
    "consistent.checkpoint.full_state_dict(module) is the whole of a module"
)

# Name -> (reason, what to call instead). An empty string stands for the default text.
REFUSED: dict[str, tuple[str, str]] = {
    "__dlpack__": (_MEMORY, _SAVE),
    "__setstate__": (
        "its state is a storage, which is a shard's",
        "consistent.from_local(shard, placement, sbp)",
    ),
    "_debug_has_internal_overlap": ("", ""),
    "_dtensor__new__": ("", ""),
    "_make_subclass": ("", ""),
    "_make_wrapper_subclass": ("", ""),
    "_nested_tensor_size": ("", ""),
    "_nested_tensor_storage_offsets": ("", ""),
    "_nested_tensor_strides": ("", ""),
    "_reduce_ex_internal": ("", "pickle.dumps(x)"),
    "_rev_view_func_unsafe": ("", ""),
    "_typed_storage": (_MEMORY, _SAVE),
    "_update_names": (_NO_NAMES, "numbers of dims"),
    "_view_func": ("", ""),
    "_view_func_unsafe": ("", ""),
    "align_as": (_NO_NAMES, "x.permute(dims)"),
    "align_to": (_NO_NAMES, "x.permute(dims)"),
    "as_strided_": (_SHAPE_IS_IN_THE_SPEC, "x.as_strided(size, stride), a new tensor"),
    "as_subclass": ("", ""),
    "const_data_ptr": (_MEMORY, _SAVE),
    "cudnn_is_acceptable": ("", ""),
    "data_ptr": (_MEMORY, _SAVE),
    "refine_names": (_NO_NAMES, "numbers of dims"),
    "rename": (_NO_NAMES, "numbers of dims"),
    "rename_": (_NO_NAMES, "numbers of dims"),
    "resize": (_SHAPE_IS_IN_THE_SPEC, "x.reshape(size) or x.new_empty(size)"),
    "resize_as": (_SHAPE_IS_IN_THE_SPEC, "x.reshape_as(y) or torch.empty_like(y)"),
    "storage": (_MEMORY, _SAVE),
    "storage_offset": (_MEMORY, _SAVE),
    "untyped_storage": (_MEMORY, _SAVE),
}


def _refusal_handler(name: str) -> Callable[..., Any]:
    """Return a handler for the query ``name`` that raises and says what to call instead."""
    why, instead = REFUSED[name]
    refuse = refusal(name, *((why,) if why else ()), instead=instead.format(f"{name}(...)"))
    return functools.partial(_refuse_storage, refuse) if name == "untyped_storage" else refuse


def _refuse_storage(refuse: Callable[..., Any], self: Any) -> None:
    """Raise for ``x.untyped_storage()``, by ``refuse`` or with a text about ``torch.export``.

    ``torch.export`` makes a fake tensor of each parameter and reads its storage first, so this is
    where it first reads a global tensor.
    """
    if sys._getframe(1).f_globals.get("__name__") == "torch._subclasses.meta_utils":
        raise RuntimeError(
            f"torch.export: x is {self._spec}, and a program recorded on fake tensors would hold "
            "this rank's shard only. Use a plain module, into which "
            "consistent.checkpoint.full_state_dict(module) was loaded, or x.full()."
        )
    refuse(self)


def _refuse_array_interface(self: Any) -> Any:
    """Raise for ``__cuda_array_interface__``, by which other libraries would take the shard."""
    raise AttributeError(  # so that hasattr returns False
        f"__cuda_array_interface__: x is {self._spec}; {_MEMORY}. "
        f"Use {_SAVE.format('__cuda_array_interface__')}."
    )


class _AbsentAttribute:
    """Descriptor that hides an attribute of ``torch.Tensor`` on ``GlobalTensor`` and its objects.

    ``hasattr`` is False then, so libraries that look for the attribute (DLPack) take another way.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, x: Any, cls: Any = None) -> Any:
        raise AttributeError(f"{self._name}: a global tensor has none, for {_MEMORY}.")


# Torch does not call __torch_function__ in these, so the class must define them: constructors,
# which take no tensor of the class, and methods.
CONSTRUCTORS = ("_make_subclass", "_make_wrapper_subclass", "_dtensor__new__")
_UNHOOKED_METHODS = ("as_subclass", "_view_func", "_view_func_unsafe", "_rev_view_func_unsafe")


def _register_handlers() -> None:
    """Register the functions of this module as handlers, by which dispatch answers queries.

    Only few become methods of the class itself. When the library works on shards with the hook off,
    a method that the class does not define reads the shard, as it should.
    """
    refusals = {name: _refusal_handler(name) for name in REFUSED}
    for name, method in {**LOGICAL, **OF_SHARD, **PARTS, **refusals}.items():
        handlers[handler_name(name)] = method
    for name in OF_SHARD_PROPERTIES:
        handlers[f"{name}.__get__"] = _shard_property_handler(name, "__get__")
        handlers[f"{name}.__set__"] = _shard_property_handler(name, "__set__")
    handlers["names.__set__"] = refusal("names.__set__", _NO_NAMES, "numbers of dims")
    for name, answer in LOGICAL_PROPERTIES.items():
        handlers[f"{name}.__get__"] = answer
    cls: Any = GlobalTensor
    for name, attribute in vars(cls).items():
        if isinstance(attribute, property):  # torch.Tensor.shape.__get__(x)
            for method, answer in (
                ("get", attribute.fget),
                ("set", attribute.fset),
                ("delete", attribute.fdel),
            ):
                if answer is not None:
                    handlers[f"{name}.__{method}__"] = answer
    handlers["_nested_tensor_from_mask_left_aligned"] = _is_left_aligned
    handlers["sparse_mask"] = sparse_mask
    handlers[handler_name("__repr__")] = _repr
    handlers[handler_name("__format__")] = format_value
    for name in _UNHOOKED_METHODS:
        setattr(cls, name, _refusal_handler(name))
    for name in CONSTRUCTORS:
        setattr(cls, name, staticmethod(_refusal_handler(name)))
    cls.__cuda_array_interface__ = property(_refuse_array_interface)
    cls.__dlpack_c_exchange_api__ = _AbsentAttribute("__dlpack_c_exchange_api__")


def _repr(self: Any, **_: Any) -> str:
    """Implement ``torch.Tensor.__repr__(x)``, for code that does not call ``repr(x)``."""
    return text_of(self)


def _is_left_aligned(*_: Any) -> bool:
    """Implement ``torch._nested_tensor_from_mask_left_aligned``: return False.

    Torch's transformer encoder calls it, and then makes no nested tensor of a global one.
    """
    return False


def _shard_property_handler(name: str, method: str) -> Callable[..., Any]:
    """Return a handler that reads or sets the property ``name`` of the shard.

    ``method`` is "__get__" or "__set__".
    """

    def call(self: Any, *args: Any) -> Any:
        with HookOff():
            return getattr(getattr(_Base, name), method)(self, *args)

    return call


_register_handlers()
