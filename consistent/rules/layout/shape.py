"""Rules of ops that move, repeat or drop elements by position.

The ops are linear, so P passes; a split stays if the op leaves its dim as it is.
"""

from __future__ import annotations

from ...spec import P, S
from ..halo.halo import with_halo
from ..notation import view_signatures
from ..signature import Call, Operand, Signature
from ..table import Row, Sizing, add_rows
from .halos import int_arguments, pad_mode, repeat_counts, roll_shifts
from .subscript import subscript_of
from .view import with_local_sizes


def repeat(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of repeat and tile: a dim that is repeated once stays split.

    Along another split dim a rank fetches the elements that its piece of the result holds. With 2
    ranks, ``[a b | c d]`` repeated twice is ``[a b c d | a b c d]``.
    """
    (x,), times = call.require_operands(1), repeat_counts(call)
    extra = len(times) - x.ndim
    once = [d for d in range(x.ndim) if times[d + extra] == 1]
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    signatures += [call.new_signature({0: S(d)}, S(d + extra)) for d in once]
    return signatures + with_halo(call, parts, [d for d in range(x.ndim) if d not in once])


def squeezed_dims(call: Call) -> tuple[int, ...]:
    """Return the dims that squeeze names: all by default, none if ``dim`` is ().

    Those of them that have size 1 are dropped.
    """
    return () if call.get("dim") == () else tuple(d for d in call.dims() if call.operands[0].ndim)


def squeeze(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of squeeze: dims of size 1 are dropped, and other dims stay split.

    Of shape [1, 4], ``S(1) -> S(0)``. On 4 ranks the shard's split dim has size 1 too, and must not
    be dropped, so the form "squeeze" runs with the logical sizes.
    """
    (x,) = call.require_operands(1)
    named_dims = squeezed_dims(call)
    dropped_dims = [d for d in named_dims if x.shape[d] == 1]
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    for d in range(x.ndim):
        if d not in dropped_dims:
            place = d - sum(g < d for g in dropped_dims)
            signatures.append(
                call.new_signature({0: S(d)}, S(place), form="squeeze" if d in named_dims else None)
            )
    return signatures


def padding(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of pads: dims that are not padded stay split, and P passes.

    Along a padded dim ranks fetch what their piece of the result reads. P does not pass if a
    constant other than 0 is the padding, since every rank would add it.
    """
    (x,) = call.require_operands(1)
    pad, value = call.get("pad"), call.get("value")
    mode, dims = pad_mode(call), range(x.ndim)
    unpadded = [d for d in dims if not any(pad[2 * (x.ndim - 1 - d) :][:2])]
    padded_dims = [d for d in dims if d not in unpadded]
    if mode != "constant":  # torch accepts an empty batch, but no other empty dim
        batch = x.ndim == len(pad) // 2 + 2
        unpadded = [
            d for d in unpadded if (batch and d == 0) or x.shape[d] >= x.spec.placement.size
        ]
    zero = value is None or value == 0
    signatures = call.same_split_signatures(unpadded) + with_halo(call, parts, padded_dims)
    return (
        signatures + [call.new_signature({0: P}, P)] if zero or mode != "constant" else signatures
    )


def diag_embed(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of diag_embed: dims other than the last stay split.

    diag_embed makes two dims of the last one. With default dims, [b, n] -> [b, n, n] has ``S(0) ->
    S(0)``.
    """
    (x,) = call.require_operands(1)
    n = x.ndim + 1
    new_dims = {call.dim("dim1", -2, ndim=n), call.dim("dim2", -1, ndim=n)}
    kept_dims = [d for d in range(n) if d not in new_dims]
    signatures = [call.broadcast_signature(), call.new_signature({0: P}, P)]
    return signatures + [
        call.new_signature({0: S(d)}, S(place)) for d, place in enumerate(kept_dims)
    ]


def meshgrid(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of meshgrid: a split of vector i splits all outputs along dim i.

    On a single axis all vectors may be split at once: then only output i is split along dim i.
    With ``indexing="xy"`` the first two dims change places.
    """
    count = len(call.operands)
    order = list(range(count))
    if call.kwargs.get("indexing", "ij") == "xy" and count > 1:
        order[:2] = [1, 0]
    signatures = [call.broadcast_signature(), call.new_signature({i: P for i in range(count)}, P)]
    vectors = [x.index for x in call.operands if x.ndim == 1]
    # All vectors split: output i is split along the dim of vector i. With several axes another one
    # might split all outputs along a single dim, so it is done with one axis only.
    if len(vectors) == count > 1 and call.operands[0].spec.placement.ndim == 1:
        outs = [S(order[i]) for i in range(count)]
        signatures.append(call.new_signature(dict.fromkeys(range(count), S(0)), outs, "meshgrid"))
    return signatures + [call.new_signature({i: S(0)}, S(order[i])) for i in vectors]


def scatter_into_view(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of select_scatter, slice_scatter and diagonal_scatter.

    Both operands are split along a dim in which the op selects nothing. Along the dim in which it
    selects, ``S(d), B -> S(d)``: each rank writes what falls into its shard. P passes if both
    operands are P.
    """
    x, source = call.require_operands(2)
    view = Call(
        call.name.removesuffix("_scatter"),
        *_arguments_without(call, source),
        (x,),
        params=call.params,
    )
    selected_dims = [call.dim("dim", 0)] if "dim" in call.params else []
    signatures = [call.broadcast_signature(), call.new_signature({0: P, 1: P}, P)]
    for d in selected_dims:  # each rank writes into its own shard
        if any(item.dim == d for item in subscript_of(call).of_kind("all")):
            signatures.append(call.new_signature({0: S(d), 1: S(d)}, S(d)))
        else:
            signatures.append(call.new_signature({0: S(d)}, S(d), "write_slice"))
    for signature in view_signatures(view, parts):
        entry = signature.ins[0]
        if entry.is_split and entry.dim not in selected_dims:  # type: ignore[attr-defined]
            signatures.append(call.new_signature({0: entry, 1: signature.outs[0]}, entry))
    return signatures


def _arguments_without(call: Call, source: Operand) -> tuple[tuple, dict]:
    """Return the arguments of ``call`` without the operand ``source``.

    They are those of the view that an op such as select_scatter writes to.
    """
    args = tuple(a for a in call.args if a is not source)
    return args, {k: v for k, v in call.kwargs.items() if v is not source}


_VIEW = "... -> view(...); moves"
_MOVES_ALONG = "...<D> -> ...<D>; moves"

ROWS = (
    Row(
        "adjoint atleast_1d atleast_2d atleast_3d diagonal moveaxis movedim permute swapaxes "
        "swapdims t transpose unsqueeze",
        _VIEW,
    ),
    Row("broadcast_tensors", "...* -> ...*; moves"),
    Row(
        "broadcast_to expand", _VIEW, localize=with_local_sizes,
        numbers="*", sizing=Sizing.EXPAND,
    ),
    Row("constant_pad_nd", padding, "input pad value", by_value=True),
    Row("diag diagflat", "[...] -> _"),
    Row("diag_embed", diag_embed, "input offset dim1 dim2"),
    Row("diagonal_scatter", scatter_into_view, "input src offset dim1 dim2"),
    Row("diff", "...<D>* -> ...<D>", "input n dim=-1 prepend append"),
    Row("expand_as", "..., shape(...) -> ...; moves", "input other"),
    Row("flip", _MOVES_ALONG, "input dims", along=lambda call: int_arguments(call, "dims")),
    Row("fliplr", _MOVES_ALONG, "input dim=1"),
    Row("flipud", _MOVES_ALONG, "input dim=0"),
    # Not decomposed: torch.meshgrid would call itself, as a helper in its body looks for hooks.
    Row("meshgrid", meshgrid, composite=True),
    # Only the device and dtype of x are read.
    Row("new_empty new_empty_strided new_full new_ones new_tensor new_zeros", "shape(...) -> _"),
    Row("pad", padding, "input pad mode value", by_value=True),
    Row("repeat tile", repeat, moves=True),
    Row(
        "roll", _MOVES_ALONG, "input shifts dims",
        along=lambda call: tuple(roll_shifts(call)) or None,
    ),
    Row("rot90", _MOVES_ALONG, "input k dims=(0,1)", along="dims"),
    Row("select_scatter", scatter_into_view, "input src dim index"),
    Row("slice_scatter", scatter_into_view, "input src dim start end step"),
    Row("squeeze", squeeze, "input dim", moves=True, any_size=True),
    Row("tril triu", "...mn -> ...mn; mn by triangular", "input diagonal"),
    Row("unbind", "...[D] -> view(...[D]*); moves", "input dim=0"),
    Row("unfold", "...<D> -> view(...<D>); moves", "input dim size step"),
)  # fmt: skip

add_rows(ROWS)
