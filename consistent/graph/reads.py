"""Values that a step asks for while it is recorded: those that follow from sizes, and from whole
numbers and truth values among its plain arguments, are known.

```
if mask.all():        is asked of the mask at hand: the program is for masks of which this is True
```

Models ask whether a token is padding. What a program has asked for it keeps, and it serves the
arguments for which the answers are the same.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from ..spec.nested import map_each, tensors_in

KNOWN = 1 << 20  # the most elements of a tensor whose values are followed

# Methods that tell something of a tensor that does not depend on its values.
_NO_VALUES = frozenset(
    """__get__ __hash__ __len__ data_ptr dim element_size get_device is_complex is_contiguous
    is_floating_point is_inference ndimension nelement numel size storage_offset stride
    type""".split()
)


def is_followed(x: torch.Tensor) -> bool:
    """Whether the values of an argument are known while a step is recorded or simulated."""
    return not x.is_meta and may_be_followed(x.dtype, x.numel())


def may_be_followed(dtype: torch.dtype, numel: int) -> bool:
    """Whether the values of so many elements are known, where they follow from others that are."""
    return not (dtype.is_floating_point or dtype.is_complex) and numel <= KNOWN


def is_answer(name: str, out: Any) -> bool:
    """Whether a function of that name has told a value."""
    return name not in _NO_VALUES and out is not None and not tensors_in(out)


def same_answer(a: Any, b: Any) -> bool:
    """Whether two answers to one question are the same."""
    if hasattr(a, "tobytes") and hasattr(b, "tobytes"):  # arrays of numpy
        return a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and bool(a == b)


def as_it_is(answer: Any) -> Any:
    """A copy of an answer: the step may write into a list or an array that it got."""
    return deepcopy(answer) if isinstance(answer, list) or hasattr(answer, "tobytes") else answer


def answer_text(answer: Any) -> str:
    """What ranks tell each other of an answer."""
    array = hasattr(answer, "tobytes") and hasattr(answer, "tolist")
    return repr(answer.tolist() if array else answer)  # numpy leaves out the middle of a long one


def shapes(*given: torch.Tensor) -> list[tuple[int, ...]]:
    """The shapes of tensors, where values decide them."""
    return [tuple(x.shape) for x in given]


def decides_shapes(func: Any, given: tuple, out: Any) -> bool:
    """Whether values of its arguments may decide the shapes of what ``func`` has given, ``out``;
    ``given`` has (args, kwargs) without values."""
    args, kwargs = map_each(given, torch.device, lambda _: torch.device("meta"))
    try:
        made = func(*args, **kwargs)
    except Exception:  # noqa: BLE001  (meta kernels raise errors of many kinds)
        return True
    return shapes(*tensors_in(made)) != shapes(*tensors_in(out))
