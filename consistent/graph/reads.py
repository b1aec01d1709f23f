"""Tensor values that a step reads while it is recorded, such as ``mask.all()``, and the answers.

Values are known while recording if they follow from sizes, or from integers and bools among plain
arguments.

```
if mask.all():        answered from the mask of this call: the program serves only masks for
                      which the answer is the same
```

Models check, for example, whether a token is padding. A program keeps these questions with their
answers, and serves only arguments that give the same answers.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

from ..dispatch.plans.shards import HookOff, is_global
from ..rules.notation.holds import is_integral
from ..spec.nested import map_instances, map_tensors, tensors_in

# The most elements of a tensor whose values are kept while recording.
MAX_FOLLOWED_ELEMENTS = 1 << 20

# Methods whose result does not depend on a tensor's values.
_METHODS_WITHOUT_VALUES = frozenset(
    """__get__ __hash__ __len__ data_ptr dim element_size get_device is_complex is_contiguous
    is_floating_point is_inference ndimension nelement numel size storage_offset stride
    type""".split()
)


def is_followed(x: torch.Tensor) -> bool:
    """Return whether the values of ``x``, an argument of a step, are kept while it is recorded.

    They then answer questions about ``x`` and about what is computed from it. Integers and bools
    are kept, up to ``MAX_FOLLOWED_ELEMENTS`` elements. The search for plans and the
    simulation use the same rule.
    """
    return not x.is_meta and may_be_followed(x.dtype, x.numel())


def may_be_followed(dtype: torch.dtype, numel: int) -> bool:
    """Return whether values of this dtype and number of elements are kept, as in ``is_followed``.

    Integers and bools are kept, up to ``MAX_FOLLOWED_ELEMENTS`` elements.
    """
    return is_integral(dtype) and numel <= MAX_FOLLOWED_ELEMENTS


def is_answer(name: str, out: Any) -> bool:
    """Return whether the result ``out`` of the function ``name`` reveals values of a tensor.

    ``x.item()`` does, ``x.size()`` does not, and neither does a result that is a tensor.
    """
    return name not in _METHODS_WITHOUT_VALUES and out is not None and not tensors_in(out)


def same_answer(a: Any, b: Any) -> bool:
    """Return whether two answers to one question are the same: numbers, lists, or arrays of numpy.

    A recorded program serves other inputs only if they give the same answers.
    """
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):  # arrays of numpy
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def copy_if_mutable(answer: Any) -> Any:
    """Return ``answer``, copied if it is a list or array, which the step may change."""
    return deepcopy(answer) if isinstance(answer, list) or hasattr(answer, "tobytes") else answer


def answer_text(answer: Any) -> str:
    """Return the text of an answer, by which ranks compare their answers.

    Arrays of numpy are written in full.
    """
    array = hasattr(answer, "tobytes") and hasattr(answer, "tolist")
    return repr(answer.tolist() if array else answer)  # numpy elides long ones


def shapes(*given: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of tensors, which a program keeps as an answer if values decide them.

    The values of ``mask`` decide the shape of ``x[mask]``, for example.
    """
    return [tuple(x.shape) for x in given]


def result_by_values(
    func: Any, given: tuple, value_of: Callable[[torch.Tensor], torch.Tensor | None]
) -> Any:
    """Return the result of ``func`` on ``meta`` where the shapes in it follow from known values.

    For ``x[mask]`` with a known mask it has one row for each True, and x need not be known. Only
    integers and bools can decide shapes: masks, indices, repetitions, lengths.

    Args:
        func: the function that is called.
        given: (args, kwargs) of the call.
        value_of: returns the value of a tensor, or None if it is not known.

    Returns:
        The result; None if a value that may decide a shape is not known, or if the result itself is
            a value and not all operands are known.
    """
    known = {id(x): value_of(x) for x in tensors_in(given)}
    missing = [x for x in tensors_in(given) if known[id(x)] is None]
    if len(missing) == len(known) or any(is_integral(x.dtype) for x in missing):
        return None
    # On meta first: no memory is needed. Not all kernels of meta take values on the CPU, and those
    # are given zeros, which all lie at one address.
    for substitute in (_empty_on_meta, _zeros_at_one_address):
        args, kwargs = map_tensors(
            given,
            lambda x, substitute=substitute: substitute(x) if (v := known[id(x)]) is None else v,
        )
        try:
            with HookOff(), torch.no_grad():
                result = func(*args, **kwargs)
        except Exception:  # noqa: BLE001  (meta kernels raise errors of many kinds)
            continue
        if missing and not tensors_in(result):
            return None
        return map_tensors(result, lambda x: x if x.is_meta else x.to("meta"))
    return None


def shapes_by_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in ``func(*args, **kwargs)``, see ``result_by_values``.

    Values of global tensors and of tensors on ``meta`` are not known; those of others are.
    """

    def value_of(x: torch.Tensor) -> torch.Tensor | None:
        return None if x.is_meta or is_global(x) else x

    return shapes(*tensors_in(result_by_values(func, (args, kwargs), value_of)))


def _empty_on_meta(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _zeros_at_one_address(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=x.dtype).expand(x.shape)


def decides_shapes(func: Any, given: tuple, out: Any) -> bool:
    """Return whether values of arguments may decide the shapes in ``out``, the result of ``func``.

    ``func`` is run on ``given``, its (args, kwargs) without values (on meta). If it fails or
    returns other shapes, values do decide.
    """
    args, kwargs = map_instances(given, torch.device, lambda _: torch.device("meta"))
    try:
        meta_result = func(*args, **kwargs)
    except Exception:  # noqa: BLE001  (meta kernels raise errors of many kinds)
        return True
    return shapes(*tensors_in(meta_result)) != shapes(*tensors_in(out))
