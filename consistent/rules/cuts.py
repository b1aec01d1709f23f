"""SBP signatures for a dim with a cut: a split other than into balanced contiguous pieces.

An example of a cut is a zigzag. A signature with S for operands and outputs that runs the op itself
on the shards holds for any number of ranks. So it holds with as many ranks as items, and then each
item of the result is a function of that item of the operands only, the same function on each rank.
So the signature holds for any division of the items, if all split tensors are divided in the same
way. The same is true of one whose output is a sum (or a maximum) of the ranks' results. An op that
depends on the positions of items, or on the sizes of neighbours, needs a form, and its signatures
have only S without a cut. An operand with a cut fits none of these and is boxed like any operand in
another layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..spec import NdSbp, Placement, Sbp, Split, TensorSpec, invalid_cut_reason
from ..spec.cut import DimCut
from .families.indexing.getitem import keeps_split_dim
from .signature import Call, Signature
from .table import Row, Sizing

# Forms whose results are split as the operand is, item for item. They use no positions, or (such as
# dropout) the logical position of each contiguous run of items that the rank holds.
_ITEMWISE_FORMS = frozenset(
    """softmax layer_norm rms_norm dropout native_dropout alpha_dropout
    random_fill random_like normal_of rrelu nll_loss cross_entropy""".split()
)
# Forms that combine the ranks' results in any order.
_JOINING_FORMS = frozenset(
    """sum mean nanmean prod logsumexp variance norm cosine_similarity mean_loss half_loss nll_loss
    cross_entropy any_or_all amax_or_amin aminmax""".split()
)
# Forms that take rows in any order, but need the classes of a rank to be one contiguous run.
_CLASS_FORMS = ("nll_loss", "cross_entropy")


def with_cuts(
    options: Sequence[Signature], row: Row, call: Call, placement: Placement, axis: int
) -> list[Signature]:
    """Return ``options``, and variants of them with the cuts that operands have on ``axis``.

    A cut is an unbalanced division of a dim, such as a zigzag. If an operand is ``S(0,
    cut="zigzag")``, the option ``S(0) -> S(0)`` gives the variant ``S(0, cut="zigzag") -> S(0,
    cut="zigzag")``, so that the operand need not be boxed. Options by which an operand would be
    split in an impossible way, such as a cut piece split again by a later axis, are left out.
    """
    specs = [operand.spec for operand in call.operands]
    cuts = [e.cut for s in specs if isinstance(e := s.sbp[axis], Split) and e.cut is not None]
    variants = [
        variant
        for cut in dict.fromkeys(cuts)
        for option in options
        if (variant := as_cut(option, row, call, placement.shape[axis], cut)) is not None
    ]
    candidates = [*options, *variants]
    return [
        o
        for o in candidates
        if all(_can_be_split_as(s, e, axis) for s, e in zip(specs, o.ins, strict=True))
    ]


def _can_be_split_as(spec: TensorSpec, entry: Sbp, axis: int) -> bool:
    new_sbp = (*spec.sbp[:axis], entry, *spec.sbp[axis + 1 :])
    return invalid_cut_reason(new_sbp, spec.placement, spec.shape) is None


def as_cut(option: Signature, row: Row, call: Call, parts: int, cut: DimCut) -> Signature | None:
    """Return a variant of ``option`` whose splits all have ``cut``; None if that is incorrect.

    It is correct if the op treats the items of the split dim independently of their position, and
    if all split dims have the same size, which ``cut`` can divide among ``parts`` ranks.
    """
    if option.by_size or not _holds_for_cuts(option, row, call):
        return None
    shapes = [x.shape for x in (*call.operands, *call.outs)]
    entries = [*option.ins, *option.outs]
    sizes = {s[e.dim] for s, e in zip(shapes, entries, strict=True) if isinstance(e, Split)}
    if len(sizes) != 1 or cut.invalid_reason(sizes.pop(), parts):
        return None

    def with_cut(entries: NdSbp) -> NdSbp:
        return tuple(Split(e.dim, cut) if isinstance(e, Split) else e for e in entries)

    # No plan for all sizes: such plans compute the local sizes of a view as for a split without a
    # cut, and at another size a slice may leave items out.
    by_size = row.sizing is Sizing.VIEW or call.name == "getitem"
    return replace(option, ins=with_cut(option.ins), outs=with_cut(option.outs), by_size=by_size)


def _holds_for_cuts(option: Signature, row: Row, call: Call) -> bool:
    """Return whether ``option`` holds for a cut too: the op must ignore positions along the split.

    If no form runs the op, the row decides (``serves_any_size``), or for ``x[...]`` the subscript.
    A form must be in one of the lists above.
    """
    if not any(e.is_split for e in option.ins):
        return False
    if option.form is None and call.name == "getitem":
        return keeps_split_dim(call, option.ins[0])
    if option.form is None:
        return row.serves_any_size(call, [(entry,) for entry in option.ins])
    if call.name.startswith("feature_"):  # one random number for a whole channel
        return False
    if option.form in _CLASS_FORMS and _splits_classes(option, call):
        return False
    allowed_forms = _ITEMWISE_FORMS if any(e.is_split for e in option.outs) else _JOINING_FORMS
    return option.form in allowed_forms


def _splits_classes(option: Signature, call: Call) -> bool:
    first = option.ins[0]
    return isinstance(first, Split) and first.dim == min(1, call.operands[0].ndim - 1)
