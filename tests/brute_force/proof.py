"""One signature run on simulated ranks, gathered, and compared with what is expected."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map

from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.forms import FORMS, Shards
from consistent.forms.random import generator
from consistent.rules import Operand, Out
from consistent.spec import NdSbp, TensorSpec, dual_nd
from tests.brute_force.called import Grid, replaced, shown
from tests.brute_force.combinations import Chosen, combinations
from tests.brute_force.expected import RANDOM, Expected
from tests.ranks import ALL, simulate
from tests.reference import Tensors, assert_close, join

Made = tuple[Tensors, Tensors, Tensors]  # outputs, operands that were written to, gradients


class Earlier:
    """What earlier calls have proven, and later ones need not again."""

    def __init__(self) -> None:
        # Of several axes: the kinds of signatures that an op has shown side by side.
        self.kinds: dict[Any, set[Any]] = defaultdict(set)
        # What ranks outside have run: on one axis each form of an op for each layout of its
        # results, on several each form on its axes.
        self.outside: set[Any] = set()


@dataclass(frozen=True)
class Example:
    """One call to prove a row with. `reference` computes the whole result where `func` itself
    does not."""

    func: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any] = field(default_factory=dict)
    reference: Callable[..., Any] | None = None

    def __repr__(self) -> str:
        return f"{resolve(self.func).name}{shown(self.args, self.kwargs)}"

    def expected(self, ranks: Grid = 3) -> Expected:
        """What torch makes of it, which is computed once."""
        if id(self) not in _expected:
            whole = Expected(self.func, self.args, self.kwargs, reference=self.reference)
            _expected[id(self)] = self, whole
        return _expected[id(self)][1].on(ranks)

    def check(self, ranks: Grid = 3, earlier: Earlier | None = None) -> None:
        """Prove every signature that the row of its function claims; see the function `check`."""
        prove_claims(self.expected(ranks), Earlier() if earlier is None else earlier)


_expected: dict[int, tuple[Example, Expected]] = {}


def example(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Example:
    """`func(*args, **kwargs)` as an example."""
    return Example(func, args, kwargs)


def check(
    func: Callable[..., Any],
    *args: Any,
    ranks: Grid = 3,
    reference: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> int:
    """Prove every signature that the row of `func` claims for this call; how many there were.

    Args:
        ranks: size of the one axis, or sizes of several: then combinations over the axes, with
            each signature of each axis among them, and each kind beside each other kind.
        reference: what to compare with, called like `func`; `func` itself by default.

    Raises:
        AssertionError: a signature is wrong; the message names it and says what differs.
    """
    return prove_claims(Expected(func, args, kwargs, ranks, reference), Earlier())


def prove_claims(op: Expected, earlier: Earlier) -> int:
    """Prove every signature that is claimed, but for what `earlier` has; how many there were."""
    kinds = set() if ALL else earlier.kinds[op.known.name, op.known.inplace]
    claimed = combinations(op, kinds)
    assert claimed, f"{op}: no signature fits"
    prove(op, claimed, earlier)
    return len(claimed)


def prove(op: Expected, claimed: Sequence[Chosen], earlier: Earlier | None = None) -> None:
    """Raise where one of `claimed`, a signature for each axis, does not give what is expected.
    What ranks outside have run in `earlier` calls they do not run again."""
    proofs, outside = [], Earlier().outside if earlier is None else earlier.outside
    for chosen in claimed:
        with _named(op, chosen):
            proofs.append(_proof(op, chosen))
        formed = proofs[-1].formed()
        if proofs[-1].form and (ALL or formed not in outside):
            proofs[-1].add_a_rank_outside()
            outside.add(formed)
    results = iter(_simulated([proof for proof in proofs if proof.form]))
    for proof in proofs:
        with _named(op, proof.chosen):
            proof.judge(next(results) if proof.form else proof.local())


# -- one signature ---------------------------------------------------------------------------------


def _proof(op: Expected, chosen: Chosen) -> Proof:
    count = len(op.tensors)
    assert all(len(s.ins) == count and len(s.outs) == len(op.call.outs) for s in chosen), (
        "wrong number of SBPs"
    )
    if any(e.is_extreme for s in chosen for e in (*s.ins, *s.outs)):
        op = op.forward_only()
    return Proof(op, chosen)


@contextlib.contextmanager
def _named(op: Expected, chosen: Chosen) -> Iterator[None]:
    """Say in an error which signatures it is of."""
    try:
        yield
    except Exception as error:
        text = " | ".join(map(repr, chosen))
        raise AssertionError(
            f"{op}\n  on {op.placement.shape} ranks, {text}\n  {error!r}"
        ) from error


def _simulated(proofs: list[Proof]) -> list[list[Any]]:
    """What the ranks make of each proof; they start once for all, for a start costs more than most
    ops."""

    def on_rank(rank: int) -> list[Made | None]:
        made: list[Made | None] = []
        for proof in proofs:
            with _named(proof.op, proof.chosen):
                made.append(proof.run(rank) if rank < proof.ranks else None)
        return made

    if not proofs:
        return []
    by_rank = simulate(on_rank, max(proof.ranks for proof in proofs))
    made = zip(*by_rank, strict=True)
    return [list(each[: proof.ranks]) for proof, each in zip(proofs, made, strict=True)]


class Proof:
    """A signature for each axis, and the call's shards and cotangents under it."""

    def __init__(self, op: Expected, chosen: Chosen) -> None:
        self.op, self.chosen = op, chosen
        self.ins = [tuple(s.ins[i] for s in chosen) for i in range(len(op.tensors))]
        self.outs = [tuple(s.outs[i] for s in chosen) for i in range(len(op.call.outs))]
        self.form = next((s.form for s in chosen if s.form is not None), None)
        self.axes = tuple(axis for axis, s in enumerate(chosen) if s.form is not None)
        pairs = zip(op.call.operands, self.ins, strict=True)
        self.in_specs = [o.spec.with_sbp(sbp) for o, sbp in pairs]
        self.promised, self.out_specs = self._specs(op.call.outs), self._specs(op.expected)
        self.shards = [op.scatter(t, sbp) for t, sbp in zip(op.tensors, self.ins, strict=True)]
        duals = [dual_nd(self.outs[i]) for i in op.differentiable]
        self.cotangents = [op.scatter(g, sbp) for g, sbp in zip(op.cotangents, duals, strict=True)]

    def _specs(self, outs: Sequence[Out] | Tensors) -> list[TensorSpec]:
        return [
            TensorSpec.of(self.op.placement, sbp, o.shape, o.dtype)
            for o, sbp in zip(outs, self.outs, strict=True)
        ]

    @property
    def ranks(self) -> int:
        """Those that run: all of the placement, and the one outside, once it is added."""
        return len(self.shards[0])

    def judge(self, results: list[Made]) -> None:
        """Raise where what the ranks made is not what is expected."""
        op, size = self.op, self.op.placement.size
        for rank, (found, _, _) in enumerate(results):
            self._check_layout(found, rank)
        found, written, gradients = (list(each) for each in zip(*results[:size], strict=True))
        self._compare("output", found, self.outs, op.expected)
        after = [op.after[i] for i in op.written]
        self._compare("written operand", written, [self.ins[i] for i in op.written], after)
        duals = [dual_nd(self.ins[i]) for i in op.leaves]
        self._compare("gradient", gradients, duals, op.gradients)

    def local(self) -> list[Made]:
        """What each rank makes where none sends."""
        return [self.run(rank) for rank in range(self.op.placement.size)]

    def made(self) -> list[Made]:
        """What each rank makes, side by side if a form may send."""
        return simulate(self.run, self.ranks) if self.form else self.local()

    def formed(self) -> tuple[Any, ...]:
        """What a rank outside is a proof of."""
        if len(self.chosen) == 1:
            return self.op.known.name, self.form, self.chosen[0].outs
        return tuple(s.form for s in self.chosen)

    def add_a_rank_outside(self) -> None:
        """It holds meta shards and runs the same, unless outputs are known without running."""
        op = self.op
        if op.data_dependent or op.row.known_outs(op.call) is not None:
            return
        specs = self.in_specs + [self.out_specs[i] for i in self.op.differentiable]
        for held, spec in zip(self.shards + self.cotangents, specs, strict=True):
            held.append(torch.empty(spec.local_shape(None), dtype=spec.dtype, device="meta"))

    def run(self, rank: int) -> Made:
        """(outputs, operands that were written to, gradients) on a rank."""
        op = self.op
        leaves, given = op.track([s[rank].clone() for s in self.shards])
        with generator.separate_state(RANDOM):
            result = self._call(rank, given)
        found = op.results(result, given)
        try:
            back = op.backward(found, leaves, [g[rank] for g in self.cotangents])
        except NotImplementedError:  # torch has no meta form of some backward
            if rank < op.placement.size:
                raise
            back = []
        return [t.detach() for t in found], [given[i].detach() for i in op.written], back

    def _call(self, rank: int, given: Tensors) -> Any:
        """What dispatch would run."""
        if self.form is not None:
            return self._by_form(given)
        if self.op.row.localize is None:
            return self.op.run(given)
        return self._localized(rank, given)

    def _localized(self, rank: int, given: Tensors) -> Any:
        op = self.op
        assert op.row.localize is not None
        at = op.placement.coordinate_of(rank)
        ins, outs = ([s.local_shape(at) for s in side] for side in (self.in_specs, self.promised))
        made = op.row.localize(op.call, ins, outs)
        args, kwargs = tree_map(lambda x: given[x.index] if isinstance(x, Operand) else x, made)
        return op.known.run(*args, **kwargs)

    def _by_form(self, given: Tensors) -> Any:
        op = self.op
        assert self.form is not None
        args, kwargs = replaced(op.args, op.kwargs, given)
        local = Shards(
            op.known.run, op.call, self.axes, tuple(given), tuple(self.in_specs),
            tuple(self.promised), args, kwargs,
        )  # fmt: skip
        made = FORMS[self.form](local)
        if not op.data_dependent:
            return made
        made, shapes = made
        assert [tuple(s) for s in shapes] == [tuple(t.shape) for t in op.expected], shapes
        return made

    def _check_layout(self, found: Tensors, rank: int) -> None:
        outs = self.out_specs
        assert len(found) == len(outs), f"rank {rank}: {len(found)} outputs, not {len(outs)}"
        at = self.op.placement.coordinate_of(rank)
        for i, (t, spec) in enumerate(zip(found, outs, strict=True)):
            want = tuple(spec.local_shape(at))
            assert tuple(t.shape) == want, (
                f"rank {rank}: output {i} has shape {tuple(t.shape)}, not {want}"
            )
            assert t.dtype == spec.dtype, f"rank {rank}: output {i} is {t.dtype}, not {spec.dtype}"

    def _compare(
        self, what: str, by_rank: list[Tensors], sbps: Sequence[NdSbp], expected: Tensors
    ) -> None:
        tolerance = self.op.tolerance
        for i, (sbp, want) in enumerate(zip(sbps, expected, strict=True)):
            shards = [tensors[i] for tensors in by_rank]
            try:
                got = join(shards, sbp, self.op.shape, tolerance)
                assert_close(got, want, rtol=tolerance, atol=tolerance)
            except (AssertionError, RuntimeError) as error:
                raise AssertionError(
                    f"{what} {i} in {sbp}: {error}\n  shards {shards}\n  whole {want}"
                ) from None
