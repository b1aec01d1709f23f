"""Changes for ``flex_attention`` and ``create_mask``, which would see shards of global tensors.

``flex_attention`` calls no ``__torch_function__``, and compiles its own function. ``create_mask``
calls a ``mask_mod`` under ``vmap``, where global tensors that it reads are not seen as global.
torch's functions stay the same objects, but their code is replaced by code that calls this library
for global tensors. Their module is changed when it is imported, because importing it loads torch's
compiler.
"""

from __future__ import annotations

import inspect
import types
from functools import cache
from typing import Any

import torch

from ..dispatch.plans.shards import common_placement, is_global, plain
from ..dispatch.running.mods import Mods, ReadWholeValues
from ..tensor.global_tensor import GlobalTensor
from .on_import import change_module


# The code of this function becomes that of torch's flex_attention, so its global names are those
# of torch's module.
def _flex_attention_code(
    query,  # noqa: ANN001
    key,  # noqa: ANN001
    value,  # noqa: ANN001
    score_mod=None,  # noqa: ANN001
    block_mask=None,  # noqa: ANN001
    scale=None,  # noqa: ANN001
    enable_gqa=False,  # noqa: ANN001
    return_lse=False,  # noqa: ANN001
    kernel_options=None,  # noqa: ANN001
    *,
    return_aux=None,  # noqa: ANN001
):  # noqa: ANN202
    call = _of_plain_tensors  # noqa: F821  # pyright: ignore
    if _GlobalTensor in (type(query), type(key), type(value)):  # noqa: F821  # pyright: ignore
        call = _of_global_tensors  # noqa: F821  # pyright: ignore
    return call(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
        return_aux=return_aux,
    )  # fmt: skip


# In the same way, the code of this function becomes that of torch's create_mask.
def _create_mask_code(
    mod_fn,  # noqa: ANN001
    B,  # noqa: ANN001, N803
    H,  # noqa: ANN001, N803
    Q_LEN,  # noqa: ANN001, N803
    KV_LEN,  # noqa: ANN001, N803
    device=None,  # noqa: ANN001
):  # noqa: ANN202
    call = _create_mask  # noqa: F821  # pyright: ignore
    # A frame that uses a global tensor is not compiled: it runs, and comes here again.
    if not torch.compiler.is_dynamo_compiling():
        call = _create_mask_of_wholes  # noqa: F821  # pyright: ignore
    return call(mod_fn, B, H, Q_LEN, KV_LEN, device)


def _change_flex_attention(module: Any) -> None:
    """Replace the code of ``flex_attention`` and ``create_mask`` in torch's ``module``.

    The new code finds the names that it uses in the module, where this function puts them.
    """
    names = vars(module)
    names["_of_plain_tensors"] = _replace_code(module.flex_attention, _flex_attention_code)
    names["_create_mask"] = _replace_code(module.create_mask, _create_mask_code)
    names["_GlobalTensor"] = GlobalTensor

    def of_global_tensors(*args: Any, **kwargs: Any) -> Any:
        return _without_dynamo(_flex_attention_of_global)(module, *args, **kwargs)

    def create_mask_of_wholes(mod_fn: Any, *args: Any) -> Any:
        return _without_dynamo(names["_create_mask"])(_MaskModOnWholes(mod_fn), *args)

    names["_of_global_tensors"] = of_global_tensors
    names["_create_mask_of_wholes"] = create_mask_of_wholes


def _replace_code(function: Any, source: Any) -> Any:
    """Replace the code of ``function`` by that of ``source``; return a function with the old code.

    ``function`` stays the same object, so the change reaches everyone who has imported it.
    """
    original = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__
    )
    original.__kwdefaults__ = function.__kwdefaults__
    # Code can be replaced only by code with as many free variables: both have none.
    function.__code__ = source.__code__
    return original


class _MaskModOnWholes:
    """Wrapper of a ``mask_mod`` that lets it read global tensors, as their whole values.

    It keeps the signature, by which torch tells a ``mask_mod`` from a ``score_mod``.
    """

    def __init__(self, function: Any) -> None:
        self._function, self._wholes = function, ReadWholeValues()
        self.__signature__ = inspect.signature(function)

    def __call__(self, *indices: Any) -> Any:
        with self._wholes:  # inside torch's own mode, which calls an autograd function
            return self._function(*indices)


@cache
def _without_dynamo(function: Any) -> Any:
    """Return ``function`` wrapped so that dynamo does not compile it or what it calls.

    Programs compile ``flex_attention``. Where it runs eagerly, dynamo would otherwise compile the
    functions that it calls piece by piece.
    """
    return torch.compiler.disable(function)


def _flex_attention_of_global(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    enable_gqa: bool,
    return_lse: bool,
    _: Any,
    return_aux: Any = None,
) -> Any:
    """Run ``flex_attention`` on global tensors, by the op of this library.

    The op has one operand for both functions of the user (``Mods``). ``module`` is torch's module
    ``flex_attention``; the other arguments are those of its function.
    """
    _check(module, query, key, value, block_mask, enable_gqa)
    mods = Mods(score_mod, block_mask, common_placement("flex_attention", [query, key, value]))
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    try:
        mods.find_tensors(next(plain(x) for x in (query, key, value) if is_global(x)).device, wide)
        # Called directly, because function modes would call torch's function again.
        out, log_sum_exp, max_scores = GlobalTensor.__torch_function__(
            module.flex_attention, (GlobalTensor,), (query, key, value, mods, scale, enable_gqa)
        )
    finally:
        mods.clear()
    if return_aux is not None:
        aux = module.AuxOutput(
            lse=log_sum_exp if return_aux.lse else None,
            max_scores=max_scores if return_aux.max_scores else None,
        )
        return out, aux
    return (out, log_sum_exp) if return_lse else out


def _check(module: Any, query: Any, key: Any, value: Any, mask: Any, enable_gqa: bool) -> None:
    """Raise the errors that torch's ``flex_attention`` raises for these arguments."""
    if (query.ndim, key.ndim, value.ndim) != (4, 4, 4):
        raise NotImplementedError("NYI: query, key, and value must be 4D tensors")
    module._validate_embed_dim(query, key, value)
    heads, key_heads = query.shape[1], key.shape[1]
    if heads % key_heads or not enable_gqa and heads != key_heads:
        raise ValueError(
            f"flex_attention: the query has {heads} heads and the keys have {key_heads}. They must "
            "be as many, or with enable_gqa=True divide those of the query."
        )
    if mask is None:
        return
    if getattr(mask, "mask_mod", None) is module._sliced_mask_mod_error:
        raise RuntimeError("Cannot use mask_mod from a sliced BlockMask")
    sizes, expected_sizes = tuple(mask.shape[-2:]), (query.shape[2], key.shape[2])
    if sizes != expected_sizes and mask.BLOCK_SIZE[0] != module._LARGE_SPARSE_BLOCK_SIZE:
        raise ValueError(
            f"flex_attention: block_mask was made for {sizes[0]} rows and {sizes[1]} keys, and "
            f"there are {expected_sizes[0]} and {expected_sizes[1]}. Create one of these sizes; "
            "they are those of the logical tensor, on all ranks."
        )


def install() -> None:
    """Change torch's module ``flex_attention``, now if it is imported, else when it is."""
    change_module("torch.nn.attention.flex_attention", _change_flex_attention)
