"""Rules of ops that move, repeat or drop elements by position.

The ops are linear, so P passes; a split stays if the op leaves its dim as it is.
"""

from __future__ import annotations

from ...spec import P, S
from ..halo.halo import with_halo
from ..notation import rearranged
from ..signature import Call, Operand, Signature
from ..table import Row, Sizing, add_rows
from .halos import numbers, pad_mode, repeats, shifts
from .subscript import subscript_of
from .view import resized


def repeated(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of repeat and tile: a dim that is repeated once stays split.

    Along another split dim a rank fetches the elements that its piece of the result holds. With 2
    ranks, ``[a b | c d]`` repeated twice is ``[a b c d | a b c d]``.
    """
    (x,), times = call.take(1), repeats(call)
    extra = len(times) - x.ndim
    once = [d for d in range(x.ndim) if times[d + extra] == 1]
    made = [call.whole(), call.make({0: P}, P)]
    made += [call.make({0: S(d)}, S(d + extra)) for d in once]
    return made + with_halo(call, parts, [d for d in range(x.ndim) if d not in once])


def squeezed_dims(call: Call) -> tuple[int, ...]:
    """Return the dims that squeeze names: all by default, none if ``dim`` is ().

    Those of them that have size 1 are dropped.
    """
    return () if call.get("dim") == () else tuple(d for d in call.dims() if call.operands[0].ndim)


def squeezed(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of squeeze: dims of size 1 are dropped, and other dims stay split.

    Of shape [1, 4], ``S(1) -> S(0)``. On 4 ranks the shard's split dim has size 1 too, and must not
    be dropped, so the form "squeeze" runs with the logical sizes.
    """
    (x,) = call.take(1)
    asked = squeezed_dims(call)
    gone = [d for d in asked if x.shape[d] == 1]
    made = [call.whole(), call.make({0: P}, P)]
    for d in range(x.ndim):
        if d not in gone:
            place = d - sum(g < d for g in gone)
            made.append(call.make({0: S(d)}, S(place), form="squeeze" if d in asked else None))
    return made


def padded(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of pads: dims that are not padded stay split, and P passes.

    Along a padded dim ranks fetch what their piece of the result reads. P does not pass if a
    constant other than 0 is the padding, since every rank would add it.
    """
    (x,) = call.take(1)
    pad, value = call.get("pad"), call.get("value")
    mode, dims = pad_mode(call), range(x.ndim)
    kept = [d for d in dims if not any(pad[2 * (x.ndim - 1 - d) :][:2])]
    acted = [d for d in dims if d not in kept]
    if mode != "constant":  # torch accepts an empty batch, but no other empty dim
        batch = x.ndim == len(pad) // 2 + 2
        kept = [d for d in kept if (batch and d == 0) or x.shape[d] >= x.spec.placement.size]
    zero = value is None or value == 0
    made = call.same(kept) + with_halo(call, parts, acted)
    return made + [call.make({0: P}, P)] if zero or mode != "constant" else made


def diagonals(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of diag_embed: dims other than the last stay split.

    diag_embed makes two dims of the last one. With default dims, [b, n] -> [b, n, n] has ``S(0) ->
    S(0)``.
    """
    (x,) = call.take(1)
    n = x.ndim + 1
    new = {call.dim("dim1", -2, ndim=n), call.dim("dim2", -1, ndim=n)}
    left = [d for d in range(n) if d not in new]
    made = [call.whole(), call.make({0: P}, P)]
    return made + [call.make({0: S(d)}, S(place)) for d, place in enumerate(left)]


def grid(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of meshgrid: a split of vector i splits all outputs along dim i.

    On a single axis all vectors may be split at once: then output i alone is split along dim i.
    With ``indexing="xy"`` the first two dims change places.
    """
    count = len(call.operands)
    order = list(range(count))
    if call.kwargs.get("indexing", "ij") == "xy" and count > 1:
        order[:2] = [1, 0]
    made = [call.whole(), call.make({i: P for i in range(count)}, P)]
    vectors = [x.index for x in call.operands if x.ndim == 1]
    # All vectors split: output i is split along the dim of vector i. With several axes another one
    # might split all outputs along a single dim, so it is done with one axis only.
    if len(vectors) == count > 1 and call.operands[0].spec.placement.ndim == 1:
        outs = [S(order[i]) for i in range(count)]
        made.append(call.make(dict.fromkeys(range(count), S(0)), outs, "meshgrid"))
    return made + [call.make({i: S(0)}, S(order[i])) for i in vectors]


def overwritten(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of select_scatter, slice_scatter and diagonal_scatter.

    Both operands are split along a dim in which the op selects nothing. Along the dim in which it
    selects, ``S(d), B -> S(d)``: each rank writes what falls into its shard. P passes if both
    operands are P.
    """
    x, source = call.take(2)
    view = Call(
        call.name.removesuffix("_scatter"), *_without(call, source), (x,), params=call.params
    )
    acted = [call.dim("dim", 0)] if "dim" in call.params else []
    made = [call.whole(), call.make({0: P, 1: P}, P)]
    for d in acted:  # each rank writes into its own shard
        if any(item.dim == d for item in subscript_of(call).of("all")):
            made.append(call.make({0: S(d), 1: S(d)}, S(d)))
        else:
            made.append(call.make({0: S(d)}, S(d), "write_slice"))
    for signature in rearranged(view, parts):
        entry = signature.ins[0]
        if entry.is_split and entry.dim not in acted:  # type: ignore[attr-defined]
            made.append(call.make({0: entry, 1: signature.outs[0]}, entry))
    return made


def _without(call: Call, source: Operand) -> tuple[tuple, dict]:
    """Return the arguments of ``call`` without the operand ``source``.

    They are those of the view that an op such as select_scatter writes to.
    """
    args = tuple(a for a in call.args if a is not source)
    return args, {k: v for k, v in call.kwargs.items() if v is not source}


_VIEW = "... -> view(...); moves"
_TURNED = "...<D> -> ...<D>; moves"

ROWS = (
    Row(
        "adjoint atleast_1d atleast_2d atleast_3d diagonal moveaxis movedim permute swapaxes "
        "swapdims t transpose unsqueeze",
        _VIEW,
    ),
    Row("broadcast_tensors", "...* -> ...*; moves"),
    Row(
        "broadcast_to expand", _VIEW, localize=resized,
        numbers="*", sizing=Sizing.EXPAND,
    ),
    Row("constant_pad_nd", padded, "input pad value", by_value=True),
    Row("diag diagflat", "[...] -> _"),
    Row("diag_embed", diagonals, "input offset dim1 dim2"),
    Row("diagonal_scatter", overwritten, "input src offset dim1 dim2"),
    Row("diff", "...<D>* -> ...<D>", "input n dim=-1 prepend append"),
    Row("expand_as", "..., shape(...) -> ...; moves", "input other"),
    Row("flip", _TURNED, "input dims", along=lambda call: numbers(call, "dims")),
    Row("fliplr", _TURNED, "input dim=1"),
    Row("flipud", _TURNED, "input dim=0"),
    # Not decomposed: torch.meshgrid would call itself, as a helper in its body looks for hooks.
    Row("meshgrid", grid, composite=True),
    # Only the device and dtype of x are read.
    Row("new_empty new_empty_strided new_full new_ones new_tensor new_zeros", "shape(...) -> _"),
    Row("pad", padded, "input pad mode value", by_value=True),
    Row("repeat tile", repeated, moves=True),
    Row("roll", _TURNED, "input shifts dims", along=lambda call: tuple(shifts(call)) or None),
    Row("rot90", _TURNED, "input k dims=(0,1)", along="dims"),
    Row("select_scatter", overwritten, "input src dim index"),
    Row("slice_scatter", overwritten, "input src dim start end step"),
    Row("squeeze", squeezed, "input dim", moves=True, any_size=True),
    Row("tril triu", "...mn -> ...mn; mn by triangular", "input diagonal"),
    Row("unbind", "...[D] -> view(...[D]*); moves", "input dim=0"),
    Row("unfold", "...<D> -> view(...<D>); moves", "input dim size step"),
)  # fmt: skip

add_rows(ROWS)
