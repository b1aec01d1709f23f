"""Conversion of a recorded step to an integer program whose costs are seconds and bytes sent.

Each node may take these layouts:

```
input of the step               only its present layout
op                              the signatures of its rule that keep the layouts of pinned results
to_global() in the step         only the layout that the program requests
```

A result is pinned if the program sees it, so that its layout must not change. Bytes are those that
the busiest rank sends: for each boxing in forward, and for the boxing of its gradient in backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ...boxing.plan import boxing_bytes
from ...graph.global_ops import CHOSEN, MOVE, Op
from ...layout_problem.figures import Figures
from ...layout_problem.problem import Edge, Node, Option, Problem
from ...layout_problem.signatures import chosen_on, has_one_form, layouts_of, may_be, work
from ...rules.candidates import candidates
from ...rules.choose import choose
from ...rules.signature import Signature
from ...spec import B, NdSbp, is_one_way
from .chain import Chain

_MOST_JOINT = 64  # combinations of layouts on all axes; beyond, only one axis may change
_NEVER = 10.0  # seconds of an impossible boxing: more than any step takes


class ChainProblem(Problem):
    """Layout problem that limits the bytes that a rank sends, instead of the bytes that it holds.

    ``kept`` contains the edges on which boxing is forbidden, because the op writes its operand in
    place.
    """

    def __init__(self, figures: Figures) -> None:
        super().__init__(figures)
        self.kept: set[Edge] = set()
        self.never = 0  # bytes of an impossible boxing

    def boxing(self, edge: Edge, have: NdSbp, want: NdSbp) -> tuple[float, int]:
        """Return (seconds, bytes sent) of boxing the value of ``edge`` from ``have`` to ``want``.

        The boxing of its gradient in backward is included. An impossible boxing gets prohibitive
        costs.
        """
        if have == want:
            return 0.0, 0
        if edge in self.kept:
            return _NEVER, self.never
        source, target = edge.spec.with_sbp(have), edge.spec.with_sbp(want)
        ways = [(source, target)] + [(target.dual, source.dual)] * edge.back
        try:
            seconds = sum(self.figures.boxing(a, b) for a, b in ways)
            return seconds, sum(boxing_bytes(a, b) for a, b in ways)
        except ValueError:  # there is no such boxing, such as from a maximum to a sum
            return _NEVER, self.never


def problem_of(chain: Chain, figures: Figures) -> tuple[ChainProblem, list[int]]:
    """Return the layout problem of ``chain``, and the solution that equals choosing op by op.

    The nodes of the problem are the inputs of the step, then the ops of ``chain.steps``, in order.
    """
    problem, alone = ChainProblem(figures), list[int]()
    made: dict[int, tuple[int, int]] = {}  # value -> (the node that makes it, index of the output)
    outs = {v for step in chain.steps for v in step.outs}
    for v, value in enumerate(chain.values):
        if v not in outs:
            problem.nodes.append(Node("given", [Option((), (value.spec.sbp,), 0.0, 0)], (), (v,)))
            alone.append(0)
            made[v] = len(problem.nodes) - 1, 0
    for step in chain.steps:
        options, index = _options(chain, step, figures)
        problem.nodes.append(Node(step.name, options, step.ins, step.outs))
        alone.append(index)
        node = len(problem.nodes) - 1
        for want, v in enumerate(step.ins):
            maker, have = made[v]
            edge = Edge(maker, have, node, want, chain.values[v].spec, step.tracked[want])
            problem.edges.append(edge)
            if step.call.inplace and want == 0:
                # An op in place writes the tensor itself: boxing would write a copy.
                problem.kept.add(edge)
        made.update({v: (node, i) for i, v in enumerate(step.outs)})
    return problem, alone


def _options(chain: Chain, step: Op, figures: Figures) -> tuple[list[Option], int]:
    """Return the options of one op, and the index of the option that it takes when it chooses
    alone."""
    outs = [chain.values[v].spec for v in step.outs]
    if step.kind == MOVE:
        return [Option((outs[0].sbp,), (outs[0].sbp,), 0.0, 0)], 0
    ins = [chain.values[v].spec for v in step.ins]
    if step.kind != CHOSEN:
        whole: NdSbp = (B,) * outs[0].placement.ndim
        wants: list[NdSbp] = [whole] * len(ins)
        if step.call.inplace:
            wants[0] = outs[0].sbp
        return [Option(tuple(wants), tuple(spec.sbp for spec in outs), 0.0, 0)], 0
    call = step.call
    base, axes = _signatures(step)
    pinned = [i for i, v in enumerate(step.outs) if chain.values[v].pinned]
    found: dict[tuple, Option] = {}
    for signatures in _joint(base, axes):
        # A pinned result is a value that the program sees, so its layout must not change.
        if any(s.outs[i] is not b.outs[i] for s, b in zip(signatures, base) for i in pinned):
            continue
        layouts = layouts_of(signatures)
        nbytes = sum(s.nbytes for s in signatures)
        tracked = any(step.tracked)
        cost = 0.0 if step.view else work(figures, call, (ins, outs), layouts, tracked)[0]
        cost += figures.sending(nbytes) if nbytes else 0.0
        option = Option(*layouts, cost, nbytes, tuple(signatures))
        if layouts not in found or (option.nbytes, cost) < (
            found[layouts].nbytes,
            found[layouts].seconds,
        ):
            found[layouts] = option
    # The op-by-op choice is always possible, even where the filters above leave it out.
    found[layouts_of(base)] = found.get(layouts_of(base)) or _only(base, figures)
    options = list(found.values())
    return options, list(found).index(layouts_of(base))


def _only(base: Sequence[Signature], figures: Figures) -> Option:
    return Option(*layouts_of(base), 0.0, sum(s.nbytes for s in base), tuple(base))


def _signatures(step: Op) -> tuple[list[Signature], list[list[Signature]]]:
    """Return (the signatures that the op takes when it chooses alone, the possible signatures).

    Both are lists with an entry for each mesh axis.
    """
    call, row = step.call, step.row
    assert row is not None
    specs = [o.spec for o in call.operands]
    by_axis = candidates(row, call, specs[0].placement)
    assert by_axis is not None
    choice = choose(call, specs, by_axis, specs[0].sbp if call.inplace else None)
    assert choice is not None
    found = [chosen_on(a, choice, options) for a, options in enumerate(by_axis)]
    base = [signature for signature in found if signature is not None]
    if any(out.data_dependent for out in call.outs):
        return base, [[s] for s in base]
    return base, [
        [s for s in dict.fromkeys([own, *options]) if s == own or may_be(s, call, parts)]
        for own, options, parts in zip(base, by_axis, specs[0].placement.shape, strict=True)
    ]


def _joint(
    base: Sequence[Signature], axes: Sequence[Sequence[Signature]]
) -> list[tuple[Signature, ...]]:
    """Return the combinations of one signature per mesh axis that a single call can run.

    In each combination one form (an op's own implementation on shards) serves all axes, and no
    tensor has two kinds of partial value, such as a sum and a maximum.
    """
    count = 1
    for options in axes:
        count *= len(options)
    joint = list(itertools.product(*axes)) if count <= _MOST_JOINT else _neighbours(base, axes)
    return [
        chosen
        for chosen in joint
        if has_one_form(chosen)
        and all(is_one_way(sbp) for side in layouts_of(chosen) for sbp in side)
    ]


def _neighbours(
    base: Sequence[Signature], axes: Sequence[Sequence[Signature]]
) -> list[tuple[Signature, ...]]:
    found = [tuple(base)]
    for axis, options in enumerate(axes):
        found += [(*base[:axis], s, *base[axis + 1 :]) for s in options]
    return list(dict.fromkeys(found))
