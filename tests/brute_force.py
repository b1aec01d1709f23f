"""Rules proven by running them: each claimed signature on simulated ranks against the op on the
whole.

```
check(torch.mm, a, b)       # every signature that the row of mm claims, on one axis of 3 ranks
check(torch.mm, a, b, ranks=(2, 2))     # on two axes: pairs of signatures
missing(torch.mm, a, b)                 # signatures that hold by value and are not claimed
```

`a` and `b` are whole tensors. Inputs are scattered as a signature says, P split at random and
unevenly, so that no wrong rule passes by luck; what dispatch would run is run on each shard, and
the gathered outputs must be those of torch on the whole. Then gradients: the outputs' cotangents
are scattered in the dual SBPs, and the gathered gradients of the inputs must be torch's (P(max)
and P(min) have none). Tensors
that the op writes to are compared as well. Forms also run on meta shards, as on a rank outside the
placement.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from consistent.local import generator
from consistent.rules import Call, Operand, Out, Row, Signature, find
from consistent.spec import (
    EXTREMES,
    B,
    NdSbp,
    P,
    Placement,
    S,
    Sbp,
    TensorSpec,
    dual_nd,
    is_one_way,
    may_be,
)
from consistent.tensor.naming import Known, know

from .pieces import Tensors, gather, scatter
from .ranks import simulate

_TOLERANCE = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-1}

# Random ops draw from this state, on the whole and on every rank.
RANDOM = generator.RngState(7, 3)


@dataclass(frozen=True)
class Example:
    """One call to prove a row with. `reference` computes the whole result where `func` itself
    does not."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"{know(self.func).name}{_shown(self.args, self.kwargs)}"

    def check(self, ranks: int | tuple[int, ...] = 3) -> int:
        return check(self.func, *self.args, ranks=ranks, reference=self.reference, **self.kwargs)


def example(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Example:
    """`func(*args, **kwargs)` as an example."""
    return Example(func, args, kwargs)


def check(
    func: Callable[..., Any],
    *args: Any,
    ranks: int | tuple[int, ...] = 3,
    reference: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> int:
    """Prove every signature that the row of `func` claims for this call; how many there were.

    Args:
        ranks: size of the one axis, or sizes of several: then combinations over the axes, at
            most 200.
        reference: what to compare with, called like `func`; `func` itself by default.

    Raises:
        AssertionError: a signature is wrong; the message names it and says what differs.
    """
    op = _Op(func, args, kwargs, ranks, reference)
    claimed = _combinations(op)
    assert claimed, f"{op}: no signature fits"
    for chosen in claimed:
        try:
            _prove(op, chosen)
        except Exception as error:
            shown = " | ".join(map(repr, chosen))
            raise AssertionError(
                f"{op}\n  on {op.placement.shape} ranks, {shown}\n  {error!r}"
            ) from error
    return len(claimed)


def missing(func: Callable[..., Any], *args: Any, ranks: int = 3, **kwargs: Any) -> list[Signature]:
    """Signatures on one axis that hold by value with the op run plainly on shards, and are not
    claimed."""
    op = _Op(func, args, kwargs, ranks, None)
    claimed = {(s.ins, s.outs) for s in op.signatures(0)}
    found = []
    for ins in itertools.product(*(_entries(t) for t in op.tensors)):
        shards = [op.scatter(t, (entry,)) for t, entry in zip(op.tensors, ins, strict=True)]
        given = [[s[rank].clone() for s in shards] for rank in range(ranks)]
        try:
            with torch.no_grad():
                results = [op.results(op.run(tensors), tensors) for tensors in given]
        except (RuntimeError, IndexError, ValueError, TypeError):
            continue
        for outs in itertools.product(*(_entries(t) for t in op.expected)):
            same = tuple(B if e.is_extreme else e for e in outs)  # B is its own largest
            if (ins, outs) not in claimed and _holds(op, results, outs):
                if same == outs or not _holds(op, results, same):
                    found.append(Signature(ins, outs))
    return found


def fixed(x: torch.Tensor) -> torch.Tensor:
    """`x`, marked as an argument that torch computes no gradient for."""
    x.takes_no_gradient = True  # type: ignore[attr-defined]
    return x


# -- one call --------------------------------------------------------------------------------------


class _Op:
    """A call taken apart: its tensors, its row, its logical outputs, and what torch makes of it."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        ranks: int | tuple[int, ...],
        reference: Callable[..., Any] | None,
    ) -> None:
        self.shape = (ranks,) if isinstance(ranks, int) else ranks
        self.placement = Placement(
            "cpu", torch.arange(torch.Size(self.shape).numel()).view(self.shape).numpy()
        )
        self.known: Known = know(func)
        assert self.known.kind == "op", (
            f"{self.known.name} is a Python function: give the builtin in it"
        )
        row = find(self.known.name)
        assert row is not None, f"{self.known.name} has no row"
        self.row: Row = row
        self.args, self.kwargs = args, kwargs
        self.tensors = _tensors((args, list(kwargs.values())))
        self.random = torch.Generator().manual_seed(0)
        operands = tuple(
            Operand(i, TensorSpec.of(self.placement, (B,) * len(self.shape), t.shape, t.dtype))
            for i, t in enumerate(self.tensors)
        )
        self.call = Call(self.known.name, *_replaced(args, kwargs, operands), operands)
        self.call.inplace = self.known.inplace
        self.call.outs = self._logical_outputs()
        self.counted = any(out.counted for out in self.call.outs)
        dtypes = {t.dtype for t in self.tensors} | {out.dtype for out in self.call.outs}
        self.tolerance = max(_TOLERANCE.get(dtype, 1e-7) for dtype in dtypes)
        self._compute_expected(reference or self.known.run)

    def __repr__(self) -> str:
        return (
            f"{self.known.name}{'_' if self.known.inplace else ''}{_shown(self.args, self.kwargs)}"
        )

    def run(self, shards: Sequence[Any]) -> Any:
        """The op with `shards` in place of its tensors."""
        args, kwargs = _replaced(self.args, self.kwargs, shards)
        return self.known.run(*args, **kwargs)

    @staticmethod
    def outputs(result: Any) -> Tensors:
        """The tensors in a result."""
        return _tensors(result)

    def results(self, result: Any, given: Tensors) -> Tensors:
        """The tensors in a result; an in-place op's is the first it was given (`x[i] = v`
        returns None)."""
        return given[:1] if self.known.inplace else self.outputs(result)

    def signatures(self, axis: int) -> list[Signature]:
        """What the row claims on `axis`, as dispatch takes it."""
        self.call.axis = axis
        options = self.row.signatures(self.call, self.shape[axis])
        dtypes = [o.spec.dtype for o in self.call.operands] + [o.dtype for o in self.call.outs]
        options = [s for s in options if all(map(may_be, s.ins + s.outs, dtypes))]
        if self.known.inplace:
            options = [s for s in options if s.ins[0] is s.outs[0]]
        return list(dict.fromkeys(options))

    def scatter(self, x: torch.Tensor, sbp: NdSbp) -> Tensors:
        """Shards of `x`, one a rank in grid order."""
        return scatter(x.detach(), sbp, self.shape, self.random)

    def _logical_outputs(self) -> tuple[Out, ...]:
        told = self.row.told_outs(self.call)
        if told is not None:
            return told
        metas = [torch.empty_like(t, device="meta") for t in self.tensors]
        with torch.no_grad():
            found = self.results(self.run(metas), metas)
        assert found, f"{self}: no tensor comes out"
        told = self.row.out_shapes(self.call)
        assert told is None or [tuple(t.shape) for t in found] == list(told), (
            f"{self}: the row says shapes {told}"
        )
        return tuple(Out(t.shape, t.dtype) for t in found)

    def _compute_expected(self, run: Callable[..., Any]) -> None:
        """Values, what is written to, and gradients of the op on the whole."""
        probes = [t.detach().clone() for t in self.tensors]
        args, kwargs = _replaced(self.args, self.kwargs, probes)
        versions = [t._version for t in probes]
        with torch.no_grad(), generator.separate(RANDOM):
            self.expected = self.results(run(*args, **kwargs), probes)
        self.written = [
            i for i, (t, v) in enumerate(zip(probes, versions, strict=True)) if t._version != v
        ]
        self.after = {i: probes[i] for i in self.written}
        self.leaves = [
            i
            for i, t in enumerate(self.tensors)
            if (t.is_floating_point() or t.is_complex())
            and not hasattr(t, "takes_no_gradient")
            and (i not in self.written or (self.known.inplace and i == 0))
        ]
        try:
            self._differentiate(run)
        except (RuntimeError, NotImplementedError) as error:  # the values alone are compared then
            if "not implemented" not in str(error):
                raise
            self.leaves, self.differentiable, self.cotangents, self.gradients = [], [], [], []

    def _differentiate(self, run: Callable[..., Any]) -> None:
        leaves, given = self.track([t.clone() for t in self.tensors])
        args, kwargs = _replaced(self.args, self.kwargs, given)
        with generator.separate(RANDOM):
            outs = self.results(run(*args, **kwargs), given)
        self.differentiable = [i for i, t in enumerate(outs) if t.requires_grad]
        self.cotangents = [
            torch.randn(outs[i].shape, dtype=outs[i].dtype, generator=self.random)
            for i in self.differentiable
        ]
        self.gradients = self.backward(outs, leaves, self.cotangents)

    def forward_only(self) -> _Op:
        """The same call without its gradients."""
        other = copy.copy(self)
        other.leaves, other.differentiable, other.cotangents, other.gradients = [], [], [], []
        return other

    def track(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
        """(leaves that take gradients, the tensors to run on). An in-place op writes to a copy
        of its leaf."""
        given = [t.detach() for t in tensors]
        leaves = []
        for i in self.leaves:
            leaves.append(given[i].requires_grad_())
            if i in self.written:
                given[i] = given[i].clone()
        return leaves, given

    def backward(self, outs: Tensors, leaves: Tensors, cotangents: Tensors) -> Tensors:
        """Gradients of `leaves`; zeros where the op has none."""
        pairs = [
            (outs[i], g)
            for i, g in zip(self.differentiable, cotangents, strict=True)
            if outs[i].requires_grad
        ]
        if not pairs or not leaves:
            return [torch.zeros_like(leaf) for leaf in leaves]
        found = torch.autograd.grad(
            [o for o, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True
        )
        return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


# -- one signature ---------------------------------------------------------------------------------


def _combinations(op: _Op) -> list[tuple[Signature, ...]]:
    """Signatures for all axes together: at most one form among them, as the choice in dispatch
    has it."""
    by_axis = [op.signatures(axis) for axis in range(len(op.shape))]
    made = [
        chosen
        for chosen in itertools.product(*by_axis)
        if len({s.form for s in chosen if s.form is not None}) <= 1
        and all(
            is_one_way(entries)
            for sides in ([s.ins for s in chosen], [s.outs for s in chosen])
            for entries in zip(*sides, strict=True)
        )
    ]
    return made if len(made) <= 200 or len(op.shape) == 1 else random.Random(0).sample(made, 200)


def _prove(op: _Op, chosen: tuple[Signature, ...]) -> None:
    count = len(op.tensors)
    ins = [tuple(s.ins[i] for s in chosen) for i in range(count)]
    outs = [tuple(s.outs[i] for s in chosen) for i in range(len(op.call.outs))]
    assert all(len(s.ins) == count and len(s.outs) == len(op.call.outs) for s in chosen), (
        "wrong number of SBPs"
    )
    shards = [op.scatter(t, sbp) for t, sbp in zip(op.tensors, ins, strict=True)]
    if any(e.is_extreme for sbp in (*ins, *outs) for e in sbp):
        op = op.forward_only()
    gradients = [
        op.scatter(g, dual_nd(outs[i]))
        for i, g in zip(op.differentiable, op.cotangents, strict=True)
    ]
    form = next((s.form for s in chosen if s.form is not None), None)
    axes = tuple(axis for axis, s in enumerate(chosen) if s.form is not None)
    in_specs = [o.spec.with_sbp(sbp) for o, sbp in zip(op.call.operands, ins, strict=True)]
    promised, out_specs = (
        [
            TensorSpec.of(op.placement, sbp, o.shape, o.dtype)
            for o, sbp in zip(found, outs, strict=True)
        ]
        for found in (op.call.outs, op.expected)
    )
    run = _runner(op, form, axes, in_specs, promised)
    follows = form is not None and not op.counted
    if follows:  # a rank outside the placement follows with meta shards
        for held, spec in zip(
            shards + gradients, in_specs + [out_specs[i] for i in op.differentiable], strict=True
        ):
            held.append(torch.empty(spec.local_shape(None), dtype=spec.dtype, device="meta"))

    size = op.placement.size

    def main(rank: int) -> tuple[Tensors, Tensors, Tensors]:
        leaves, given = op.track([s[rank].clone() for s in shards])
        with generator.separate(RANDOM):
            result = run(rank, given)
        found = op.results(result, given)
        try:
            back = op.backward(found, leaves, [g[rank] for g in gradients])
        except NotImplementedError:  # torch has no meta form of some backward
            if rank < size:
                raise
            back = []
        return [t.detach() for t in found], [given[i].detach() for i in op.written], back

    results = simulate(main, size + follows) if form else [main(rank) for rank in range(size)]
    for rank, (found, _, _) in enumerate(results):
        _same_layout(op, found, out_specs, rank)
    results = results[:size]
    _compare(op, "output", [r[0] for r in results], outs, op.expected)
    written = [ins[i] for i in op.written]
    _compare(
        op, "written operand", [r[1] for r in results], written, [op.after[i] for i in op.written]
    )
    duals = [dual_nd(ins[i]) for i in op.leaves]
    _compare(op, "gradient", [r[2] for r in results], duals, op.gradients)


def _runner(
    op: _Op, form: str | None, axes: tuple[int, ...], ins: list[TensorSpec], outs: list[TensorSpec]
) -> Callable[[int, Tensors], Any]:
    """What dispatch would run on a rank."""

    def plainly(rank: int, given: Tensors) -> Any:
        return op.run(given)

    def localized(rank: int, given: Tensors) -> Any:
        assert op.row.localize is not None
        at = op.placement.coordinate_of(rank)
        args, kwargs = op.row.localize(
            op.call, [spec.local_shape(at) for spec in ins], [spec.local_shape(at) for spec in outs]
        )
        args, kwargs = tree_map(
            lambda x: given[x.index] if isinstance(x, Operand) else x, (args, kwargs)
        )
        return op.known.run(*args, **kwargs)

    def by_form(rank: int, given: Tensors) -> Any:
        from consistent.local import FORMS, Shards

        assert form is not None
        args, kwargs = _replaced(op.args, op.kwargs, given)
        local = Shards(
            op.known.run, op.call, axes, tuple(given), tuple(ins), tuple(outs), args, kwargs
        )
        made = FORMS[form](local)
        if not op.counted:
            return made
        made, shapes = made
        assert [tuple(s) for s in shapes] == [tuple(t.shape) for t in op.expected], shapes
        return made

    if form is not None:
        return by_form
    return plainly if op.row.localize is None else localized


def _same_layout(op: _Op, found: Tensors, outs: list[TensorSpec], rank: int) -> None:
    assert len(found) == len(outs), f"rank {rank}: {len(found)} outputs, not {len(outs)}"
    at = op.placement.coordinate_of(rank)
    for i, (t, spec) in enumerate(zip(found, outs, strict=True)):
        want = tuple(spec.local_shape(at))
        assert tuple(t.shape) == want, (
            f"rank {rank}: output {i} has shape {tuple(t.shape)}, not {want}"
        )
        assert t.dtype == spec.dtype, f"rank {rank}: output {i} is {t.dtype}, not {spec.dtype}"


def _compare(
    op: _Op,
    what: str,
    by_rank: list[Tensors],
    sbps: Sequence[NdSbp],
    expected: Sequence[torch.Tensor],
) -> None:
    for i, (sbp, want) in enumerate(zip(sbps, expected, strict=True)):
        try:
            got = gather([tensors[i] for tensors in by_rank], sbp, op.shape, op.tolerance)
            torch.testing.assert_close(
                got, want, equal_nan=True, rtol=op.tolerance, atol=op.tolerance
            )
        except (AssertionError, RuntimeError) as error:
            shards = [t[i] for t in by_rank]
            raise AssertionError(
                f"{what} {i} in {sbp}: {error}\n  shards {shards}\n  whole {want}"
            ) from None


def _holds(op: _Op, results: list[Tensors], outs: tuple[Sbp, ...]) -> bool:
    try:
        for i, (entry, want) in enumerate(zip(outs, op.expected, strict=True)):
            for rank, found in enumerate(results):
                spec = TensorSpec.of(op.placement, (entry,), want.shape, want.dtype)
                if tuple(found[i].shape) != tuple(spec.local_shape((rank,))):
                    return False
            got = gather([found[i] for found in results], (entry,), op.shape)
            torch.testing.assert_close(got, want, equal_nan=True)
    except (AssertionError, RuntimeError):
        return False
    return True


def _entries(x: torch.Tensor) -> Iterator[Sbp]:
    yield B
    yield from (kind for kind in (P, *EXTREMES) if may_be(kind, x.dtype))
    yield from (S(d) for d in range(x.ndim))


# -- arguments -------------------------------------------------------------------------------------


def _tensors(value: Any) -> Tensors:
    return [x for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


def _replaced(
    args: tuple, kwargs: dict[str, Any], by: Sequence[Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments with `by` in place of their tensors, positional ones first."""
    source = iter(by)

    def one(x: Any) -> Any:
        return next(source) if isinstance(x, torch.Tensor) else x

    new_args = tree_map(one, args)
    return new_args, {name: tree_map(one, value) for name, value in kwargs.items()}


def _shown(args: tuple, kwargs: dict[str, Any]) -> str:
    def one(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
        if isinstance(x, tuple | list):
            return f"[{', '.join(map(one, x))}]"
        return repr(x)

    parts = [one(a) for a in args] + [f"{name}={one(value)}" for name, value in kwargs.items()]
    return f"({', '.join(parts)})"
