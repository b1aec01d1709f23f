"""Whether a CPU's kernels refuse a call, for ranks that do not show it by running the op.

Torch's kernels refuse some dtypes (``frac`` of integers, ``matmul`` of booleans) and some targets
of in-place ops (``x.eq_(y)`` with a ``y`` that is larger than ``x``). Two kinds of ranks would not
raise: a rank outside the placement, because the ``meta`` kernels of many ops accept such calls, and
a rank whose shard is empty, because many kernels return before they look at the dtype. Such a rank
would go on alone. So it runs the op once on small tensors, and raises what torch raises there.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...rules.signature import Call
from ..plans.arguments import collect, fill
from ..plans.shards import HookOff
from .meta_answers import cached_facts

# Texts of errors that depend on dtypes, and on sizes of 1 where others are larger; never on values.
_REFUSAL = re.compile(
    r"not implemented for|not supported for|unsupported d?type|dtype|"
    r"support (bool|complex|integ|half|tensors of type)|for (bool|complex) tensors|"
    r"integer division|bool(ean)? tensor|bounds for bool|can't be cast|"
    r"to be (float|bfloat|half|double|int)|strides should be|without overflow|the broadcast shape",
    re.IGNORECASE,
)
_MOST_ELEMENTS = 4096  # of all operands together, up to which they keep their sizes
_SMALL = 4  # length of a dimension of larger operands
_MOST_RESULTS = 1 << 16  # elements; `x.repeat(10000, 10000)` makes large results of small operands
# Op -> dtypes that its form supports and torch's kernel does not: it draws the numbers itself.
_COMPLEX = (torch.complex64, torch.complex128)
_SUPPORTED_BY_FORMS = dict.fromkeys(
    ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"), _COMPLEX
) | {"rrelu": (torch.float16,)}
_MODULES = ("torch", "torch.functional", "torch.nn.functional", "torch._tensor")
_OF_TENSOR = (types.MethodDescriptorType, types.WrapperDescriptorType)


def kernel_refusal(run: Callable[..., Any], call: Call) -> Exception | None:
    """Return the error by which a CPU's kernels refuse ``call`` for its dtypes or sizes, or None.

    The op is run on tensors of ones of the operands' dtypes, and of their shapes if these are
    small. None also if only the real operands would show it, and if ``run`` is not torch's own.
    """
    supported = _SUPPORTED_BY_FORMS.get(call.name, ())
    if any(o.spec.dtype in supported for o in call.operands) or not _is_torchs_own(run):
        return None
    cached = cached_facts(run, call)
    if "refusal" not in cached:
        cached["refusal"] = _refusal_of_small_run(run, call)
    return cached["refusal"]


def _is_torchs_own(run: Callable[..., Any]) -> bool:
    """Return whether ``run`` is an op or a function of torch, which neither communicates nor does
    anything but return its result.
    """
    if isinstance(run, torch._ops.OpOverload):
        return run.namespace == "aten"
    module = getattr(run, "__module__", None) or ""
    return isinstance(run, _OF_TENSOR) or module in _MODULES or module.startswith("torch._C")


def _refusal_of_small_run(run: Callable[..., Any], call: Call) -> Exception | None:
    shapes = _small_shapes([operand.shape for operand in call.operands])
    dtypes = [operand.spec.dtype for operand in call.operands]

    def run_on(device: str) -> Any:
        operands = [
            torch.ones(shape, dtype=dtype, device=device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        return run(*fill(call.args, operands), **fill(kwargs, operands))

    # A generator of the user's may not be advanced. The state of the default one is put back.
    kwargs = {
        k: v for k, v in call.kwargs.items() if k not in ("device", "pin_memory", "generator")
    }
    with HookOff(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            results: list[torch.Tensor] = []
            collect((run_on("meta"),), results)
        except Exception:  # noqa: BLE001, S110  (a rank outside may follow without a meta run)
            pass
        if sum(x.numel() for x in results) > _MOST_RESULTS:
            return None
        try:
            run_on("cpu")
        except Exception as error:  # noqa: BLE001  (torch raises errors of many kinds)
            # The traceback would keep the frames alive, and the tensors in them.
            return error.with_traceback(None) if _REFUSAL.search(str(error)) else None
    return None


def _small_shapes(shapes: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return ``shapes``, with shorter dimensions if the tensors have many elements together."""
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    longest = (
        max([_SMALL, *(n for s in shapes for n in s)]) if elements <= _MOST_ELEMENTS else _SMALL
    )
    return [[min(n, longest) for n in shape] for shape in shapes]
