"""Whether a CPU's kernels refuse a call, for ranks on which running the op would not show it.

Torch's kernels refuse some dtypes (``frac`` of integers, ``matmul`` of booleans) and some targets
of in-place ops (``x.eq_(y)`` with a ``y`` that is larger than ``x``). Two kinds of ranks would not
raise: a rank outside the placement, because the ``meta`` kernels of many ops accept such calls, and
a rank whose shard is empty, because many kernels return before they look at the dtype. Such a rank
would go on alone. So it runs the op once on small tensors, and raises what torch raises there.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...rules.signature import Call
from ..plans.arguments import fill
from ..plans.shards import HookOff
from .meta_answers import cached_facts

# Texts of errors that depend on the dtypes or shapes of the operands, not on values or numbers.
_REFUSAL = re.compile(
    r"not implemented for|not supported for|unsupported d?type|dtype|"
    r"support (bool|complex|integ|half|tensors of type)|for (bool|complex) tensors|"
    r"integer division|bool(ean)? tensor|can't be cast|"
    r"to be (float|bfloat|half|double|int)|strides should be|the broadcast shape",
    re.IGNORECASE,
)
_MAX_ELEMENTS = 4096  # of all operands together, up to which they keep their sizes
_SMALL = 4  # length of a dimension of larger operands
_MAX_FACTOR = 4096  # product of the integers passed; `x.repeat(10000, 10000)` makes large results
_MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")
_OF_TENSOR = (types.MethodDescriptorType, types.WrapperDescriptorType)


def kernel_refusal(run: Callable[..., Any], call: Call) -> Exception | None:
    """Return the error by which a CPU's kernels refuse ``call`` for its dtypes or shapes, or None.

    The op is run on tensors of ones of the operands' dtypes, and of their shapes if these are
    small. Returns None also for what only the real operands would show, and for a ``run`` that is
    not torch's own function, because it may do more than return a result.
    """
    if not _is_torchs_own(run):
        return None
    cached = cached_facts(run, call)
    if "refusal" not in cached:
        cached["refusal"] = _refusal_of_small_run(run, call)
    return cached["refusal"]


def _is_torchs_own(run: Callable[..., Any]) -> bool:
    if isinstance(run, torch._ops.OpOverload):
        return run.namespace == "aten"
    module = getattr(run, "__module__", None) or ""
    return isinstance(run, _OF_TENSOR) or module in _MODULES or module.startswith("torch._C")


def _refusal_of_small_run(run: Callable[..., Any], call: Call) -> Exception | None:
    if _product_of_integers((call.args, call.kwargs)) > _MAX_FACTOR:
        return None
    # A generator of the user's may not be advanced.
    kwargs = {
        k: v for k, v in call.kwargs.items() if k not in ("device", "pin_memory", "generator")
    }
    shapes = _small_shapes([operand.shape for operand in call.operands])
    generator_state = torch.default_generator.get_state()
    with HookOff(), torch.no_grad():
        try:
            operands = [
                torch.ones(shape, dtype=operand.spec.dtype, device="cpu")
                for shape, operand in zip(shapes, call.operands, strict=True)
            ]
        except Exception:  # noqa: BLE001  (a dtype that torch only stores, such as bits8)
            return None
        try:
            run(*fill(call.args, operands), **fill(kwargs, operands))
        except Exception as error:  # noqa: BLE001  (torch raises errors of many kinds)
            # The traceback would keep the frames alive, and the tensors in them.
            return error.with_traceback(None) if _REFUSAL.search(str(error)) else None
        finally:
            # Written back only after an op that drew: another thread may draw meanwhile.
            if not torch.equal(torch.default_generator.get_state(), generator_state):
                torch.default_generator.set_state(generator_state)
    return None


def _small_shapes(shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return ``shapes``, with shorter dimensions if the tensors have many elements together."""
    if sum(torch.Size(shape).numel() for shape in shapes) <= _MAX_ELEMENTS:
        return [list(shape) for shape in shapes]
    return [[min(n, _SMALL) for n in shape] for shape in shapes]


def _product_of_integers(value: Any) -> int:
    """Return the product of all integers other than 0 among nested arguments."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        return math.prod(map(_product_of_integers, value))
    return abs(value) or 1 if isinstance(value, int) else 1
