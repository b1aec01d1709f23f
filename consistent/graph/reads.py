"""Values of tensors that decide the course of a step while it is recorded, and what was answered.

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

from copy import deepcopy
from typing import Any

import torch

from ..spec.nested import map_each, tensors_in

KNOWN = 1 << 20  # the most elements of a tensor whose values are followed

# Methods whose result does not depend on a tensor's values.
_NO_VALUES = frozenset(
    """__get__ __hash__ __len__ data_ptr dim element_size get_device is_complex is_contiguous
    is_floating_point is_inference ndimension nelement numel size storage_offset stride
    type""".split()
)


def is_followed(x: torch.Tensor) -> bool:
    """Return whether the values of argument ``x`` are kept while a step is recorded or simulated.

    They then answer questions about ``x`` and about what is computed from it.
    """
    return not x.is_meta and may_be_followed(x.dtype, x.numel())


def may_be_followed(dtype: torch.dtype, numel: int) -> bool:
    """Return whether values of this dtype and number are kept if the inputs they come from are."""
    return not (dtype.is_floating_point or dtype.is_complex) and numel <= KNOWN


def is_answer(name: str, out: Any) -> bool:
    """Return whether the result ``out`` of the function ``name`` reveals values of a tensor."""
    return name not in _NO_VALUES and out is not None and not tensors_in(out)


def same_answer(a: Any, b: Any) -> bool:
    """Return whether two answers to one question, numbers or lists or arrays, are the same."""
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):  # arrays of numpy
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def as_it_is(answer: Any) -> Any:
    """Return a copy of an answer that the step may write into, a list or array, else the answer."""
    return deepcopy(answer) if isinstance(answer, list) or hasattr(answer, "tobytes") else answer


def answer_text(answer: Any) -> str:
    """Return the text of an answer, by which ranks compare their answers."""
    array = hasattr(answer, "tobytes") and hasattr(answer, "tolist")
    return repr(answer.tolist() if array else answer)  # numpy elides long ones


def shapes(*given: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of tensors, as an answer to record where values decide shapes."""
    return [tuple(x.shape) for x in given]


def decides_shapes(func: Any, given: tuple, out: Any) -> bool:
    """Return whether values of arguments may decide the shapes in ``out``, the result of ``func``.

    ``func`` is run on ``given``, its (args, kwargs) without values (on meta): values decide if it
    fails or returns other shapes.
    """
    args, kwargs = map_each(given, torch.device, lambda _: torch.device("meta"))
    try:
        made = func(*args, **kwargs)
    except Exception:  # noqa: BLE001  (meta kernels raise errors of many kinds)
        return True
    return shapes(*tensors_in(made)) != shapes(*tensors_in(out))
