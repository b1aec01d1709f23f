"""Calls that prove the rows of consistent/rules/random.py: every layout gives what one rank
draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.forms import FORMS, Shards
from consistent.rules import Call, Operand, Out, find_row
from consistent.spec import B, Placement, TensorSpec
from tests.brute_force import Example, example, fixed, replaced, tensors_in
from tests.consistent.rules.examples.numbers import complex_, real, unit, whole

_ONE = Placement("cpu", [0])


def on_one_rank(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The op by its local form on a placement of one rank."""
    known = resolve(func)
    row = find_row(known.name)
    assert row is not None
    tensors = tensors_in((args, list(kwargs.values())))
    specs = tuple(TensorSpec.of(_ONE, B, t.shape, t.dtype) for t in tensors)
    operands = tuple(Operand(i, spec) for i, spec in enumerate(specs))
    call = Call(known.name, *replaced(args, kwargs, operands), operands)
    call.inplace = known.inplace
    call.outs = row.known_outs(call) or _outs_on_meta(known.run, tensors, args, kwargs)
    form = row.signatures(call, 1)[0].form
    assert form is not None
    outs = tuple(TensorSpec.of(_ONE, B, o.shape, o.dtype) for o in call.outs)
    return FORMS[form](Shards(known.run, call, (0,), tuple(tensors), specs, outs, args, kwargs))


def _outs_on_meta(run: Callable[..., Any], tensors: Any, args: Any, kwargs: Any) -> tuple[Out, ...]:
    metas = [torch.empty_like(t, device="meta", requires_grad=False) for t in tensors]
    meta_args, meta_kwargs = replaced(args, kwargs, metas)
    made = tensors_in(run(*meta_args, **meta_kwargs))
    return tuple(Out(t.shape, t.dtype) for t in made)


def drawn(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Example:
    """An example of a random op, compared with itself on one rank."""
    return Example(func, args, kwargs, lambda *a, **k: on_one_rank(func, *a, **k))


_T, _aten = torch.Tensor, torch.ops.aten

EXAMPLES = (
    drawn(torch._sample_dirichlet, unit(4, 3)),
    drawn(torch._standard_gamma, unit(4, 3)),
    drawn(torch.alpha_dropout, real(5, 4, 2), 0.4, True),
    drawn(torch.feature_alpha_dropout, real(5, 4, 2), 0.4, True),
    drawn(torch.feature_alpha_dropout, real(5, 4, 2), 1.0, True),
    drawn(torch.bernoulli, unit(5, 4)),
    drawn(torch.bernoulli, unit(5, 4), 0.3),
    drawn(_T.bernoulli_, real(5, 4)),
    drawn(_T.bernoulli_, real(5, 4), 0.3),
    drawn(_T.bernoulli_, whole(5, 4), unit(4)),
    drawn(torch.binomial, whole(4, 3, low=1).double(), unit(4, 3)),
    drawn(_T.cauchy_, real(5, 4)),
    drawn(_T.cauchy_, real(5, 4), 1.0, sigma=2.0),
    drawn(torch.dropout, real(5, 4, 3), 0.3, True),
    drawn(torch.dropout, complex_(5, 4), 0.3, True),
    drawn(torch.dropout, real(5, 4), p=0.0, train=True),
    drawn(torch.dropout_, real(5, 4), 0.3, True),
    example(torch.dropout, real(5, 4), 0.3, False),
    example(torch.dropout_, real(5, 4), 0.3, False),
    drawn(_T.exponential_, real(5, 4)),
    drawn(torch.feature_dropout, real(5, 4, 2, 3), 0.3, True),
    drawn(torch.feature_dropout_, real(5, 4, 2), 0.3, True),
    drawn(F.fractional_max_pool2d, real(2, 4, 5, 6), 2, (3, 3)),
    drawn(F.fractional_max_pool2d_with_indices, real(2, 4, 5, 6), 2, (3, 3)),
    drawn(F.fractional_max_pool3d, real(2, 4, 4, 5, 5), 2, (2, 3, 3)),
    drawn(F.fractional_max_pool3d_with_indices, real(2, 4, 4, 5, 5), 2, (2, 3, 3)),
    drawn(_T.geometric_, real(5, 4), 0.3),
    drawn(_T.geometric_, whole(5, 4), 0.3),
    drawn(_T.log_normal_, real(5, 4)),
    drawn(torch.multinomial, unit(4, 5), 3),
    drawn(torch.native_dropout, real(5, 4), 0.3, True),
    drawn(_T.normal_, real(5, 4)),
    drawn(_T.normal_, real(5, 4), 1.0, std=2.0),
    drawn(_T.normal_, complex_(5, 4), 1.0, std=2.0),
    drawn(torch.normal, real(5, 4), unit(4)),
    drawn(torch.normal, real(5, 4), 2.0),
    drawn(torch.normal, real(5, 4)),
    drawn(torch.normal, 1.0, unit(5, 4)),
    drawn(torch.poisson, 5 * unit(4, 3)),
    drawn(torch.rand_like, real(5, 4)),
    drawn(torch.randn_like, real(5, 4), dtype=torch.float32),
    drawn(torch.randn_like, complex_(5, 4)),
    drawn(torch.randint_like, real(5, 4), 7),
    drawn(torch.randint_like, whole(5, 4), -3, 7),
    drawn(_T.random_, whole(5, 4)),
    drawn(_T.random_, whole(5, 4), 7),
    drawn(_T.random_, real(5, 4), -3, 7),
    drawn(_T.random_, real(5, 4), to=7),
    drawn(torch.rrelu, real(5, 4), 0.1, 0.4, True),
    drawn(torch.rrelu_, real(5, 4), training=True),
    example(torch.rrelu, real(5, 4), 0.1, 0.4, False),
    drawn(torch._C._nn.rrelu_with_noise, real(5, 4), fixed(unit(5, 4)), 0.1, 0.4, False),
    drawn(
        _aten.rrelu_with_noise_functional.default, real(5, 4), fixed(unit(5, 4)), 0.1, 0.4, False
    ),
    drawn(_T.uniform_, real(5, 4)),
    drawn(_T.uniform_, real(5, 4), -1.0, to=2.0),
)  # fmt: skip
